"""The flags of step 3, and what they amount to."""

from dataclasses import dataclass
from typing import ClassVar

from engine.algorithms import DIALECTS, Dialect, get_dialect
from engine.errors import UserError
from engine.optim import LR_SCHEDULES
from engine.rlhf_engine import EngineSpec
from engine.rollout import DECODING, ROLLOUT_BACKENDS, check_backend
from engine.zero.config import stage_of_file
from training.flags import deepspeed_chat, engines
from training.flags.arguments import REQUIRED, OldFlag, flag
from training.flags.data_arguments import DataFlags
from training.flags.dialect_flags import check_sampling, given_fields


@dataclass(kw_only=True)
class RLHFFlags(DataFlags):
    """Step 3. Flags without a default of their own take the dialect's value."""

    phase: ClassVar[int] = 3
    old_flags: ClassVar[dict[str, OldFlag]] = deepspeed_chat.STEP3

    num_eval_prompts: int = flag(128, "how many held-out prompts are answered at each evaluation; 0 for none")
    overlong_prompts: str = flag(
        "truncate",
        "prompts over --max_prompt_seq_len lose their beginning, or are left out",
        choices=("truncate", "drop"),
    )
    unsupervised_dataset_name: str | None = flag(
        None, "texts that the actor goes on learning as language (mixed pretraining): a data set as in --data_path"
    )
    unsupervised_dataset_config_name: str | None = flag(None, "which configuration of that data set")
    unsup_coef: float = flag(
        27.8, "coefficient of the loss on these texts: gamma in equation 2 of the InstructGPT paper"
    )

    actor_model_name_or_path: str = flag(
        REQUIRED, "the SFT model that the actor and the reference start from", group="models"
    )
    critic_model_name_or_path: str | None = flag(
        None,
        "the reward model that the critic starts from; with --reward_function it may be left out, and the critic "
        "is then the SFT model with a new head; in dialects without such a critic it names the reward model alone",
    )
    reward_model_name_or_path: str | None = flag(
        None, "the reward model; by default the critic's path, or none with --reward_function"
    )
    actor_dropout: float | None = flag(None, "0, as it is anyway: responses are learned by the function that gave them")
    critic_dropout: float | None = flag(None, "0, as it is anyway")
    dialect: str = flag("default", "whose algorithmic choices are taken", choices=tuple(DIALECTS))

    reward_function: str | None = flag(
        None,
        "a function of your own, module:function or file.py:function, that is given prompts and responses as "
        "texts and returns a number for each",
        group="rewards",
    )
    reward_function_weight: float = flag(1.0, "its weight in the score")
    reward_model_weight: float = flag(1.0, "the reward model's weight in the score")
    length_penalty: float = flag(0.0, "subtracted from the score for each token of the response")
    missing_eos_penalty: float = flag(0.0, "subtracted from the score of a response that did not end by itself")

    max_prompt_seq_len: int = flag(256, "longest prompt, in tokens", group="sizes")
    max_answer_seq_len: int = flag(256, "longest response, in tokens")
    per_device_generation_batch_size: int = flag(16, "prompts answered at once by each rank")
    generation_batches: int = flag(1, "so many times as many prompts in one step; they wait until others have ended")
    num_samples_per_prompt: int | None = flag(None, "responses drawn for each prompt")
    per_device_training_batch_size: int = flag(16, "responses in one forward and backward pass of each rank")
    gradient_accumulation_steps: int | None = flag(
        None,
        "passes in one optimizer step, which decides how many such steps there are (mini_batches); by default "
        "there are as many as the dialect has, and each takes all passes that it needs",
    )
    num_train_epochs: int = flag(1, "passes over the prompts")
    max_steps: int | None = flag(None, "steps to train, instead of --num_train_epochs")
    critic_warmup_steps: int = flag(0, "steps at the start that train the critic alone")
    enable_test_mode: bool = flag(False, "end after --test_stop_step steps, with learning rates as for the whole run")
    test_stop_step: int = flag(0, "after how many steps --enable_test_mode ends the run")

    kl_coef: float | None = flag(None, "coefficient of the KL penalty", group="algorithm")
    score_clip: float | None = flag(None, "scores are clipped to plus or minus this")
    gamma: float | None = flag(None, "discount a token")
    lam: float | None = flag(None, "lambda of GAE")
    clip_range: float | None = flag(None, "clip range of the ratio")
    value_clip_range: float | None = flag(None, "clip range of the values")
    whiten_advantages: bool | None = flag(None, "scale advantages to mean 0 and variance 1 over all tokens")
    ppo_epochs: int | None = flag(None, "passes over each step's responses")
    temperature: float | None = flag(None, "of sampling")
    old_logprobs: str | None = flag(
        None,
        "where the ratio's old log-probs come from: a forward pass over the finished responses, or the sampler, "
        "which saves that pass (rollout/logprob_gap tells how far apart the two are); auto: the sampler in fp32, where "
        "both are the same within rounding",
        choices=("auto", "forward", "sampler"),
    )
    stop: list[str] = flag([], "strings that end a response, beside the tokens that do")
    set: list[str] = flag(
        [],
        "any field of the dialect as FIELD=VALUE, such as kl_controller=adaptive kl_target=6; "
        "`python -m engine.algorithms` lists the fields; given again, or in a YAML file too, it "
        "adds to what was set",
        adds_up=True,
    )

    actor_learning_rate: float | None = flag(None, "the actor's peak learning rate", group="optimization")
    critic_learning_rate: float | None = flag(None, "the critic's peak learning rate")
    actor_weight_decay: float | None = flag(None, "AdamW's, of the actor's matrices")
    critic_weight_decay: float | None = flag(None, "AdamW's, of the critic's matrices")
    lr_scheduler_type: str | None = flag(None, "shape of the learning rate", choices=LR_SCHEDULES)
    num_warmup_steps: int | None = flag(None, "optimizer steps of rising learning rate")
    max_grad_norm: float | None = flag(None, "gradients are clipped to this norm; 0 for no clipping")

    actor_zero_stage: int | None = flag(
        None, "ZeRO stage of the actor, and 3 or 0 of the reference (default 0)", group="engines"
    )
    critic_zero_stage: int | None = flag(None, "ZeRO stage of the critic, and 3 or 0 of the reward (default 0)")
    offload: bool = flag(False, "optimizer states (stage 3: parameters too) of actor and critic in host memory")
    offload_reference_model: bool = flag(False, "the reference in host memory while it is not used")
    offload_reward_model: bool = flag(False, "the reward model in host memory while it is not used")
    actor_ds_config: str | None = flag(None, "DeepSpeed JSON of the actor, instead of one of configs/ds")
    critic_ds_config: str | None = flag(None, "DeepSpeed JSON of the critic")
    reference_ds_config: str | None = flag(None, "DeepSpeed JSON of the reference")
    reward_ds_config: str | None = flag(None, "DeepSpeed JSON of the reward model")
    actor_gradient_checkpointing: bool = flag(False, "compute the actor's activations again in backward passes")
    critic_gradient_checkpointing: bool = flag(False, "compute the critic's activations again in backward passes")
    rollout_backend: str = flag(
        "auto",
        "how responses are generated: with a whole copy of the actor on each rank, gathered once per update "
        "(replica), or through its ZeRO-3 partitions (zero3); auto takes the copy where it fits in memory",
        choices=ROLLOUT_BACKENDS,
    )
    decoding: str = flag(
        "auto",
        "how single tokens go through a whole copy: by the model's own code (plain), by a recording of its "
        "operations (recorded; auto on CPUs), or by torch.compile's, with CUDA graphs on GPUs (compiled: after a "
        "minute at the start)",
        choices=DECODING,
    )
    replicas_between_steps: str = flag(
        "keep",
        "what becomes of the whole copies that responses and experience are made with, while actor and critic train",
        choices=("keep", "free", "host"),
    )

    enable_ema: bool = flag(
        False, "keep a moving average of the actor's weights; saved beside the actor", group="average of the actor"
    )
    ema_decay: float | None = flag(None, "its decay")
    ema_device: str | None = flag(None, "where it is kept; by default beside the master weights", choices=("cpu",))

    eval_steps: int = flag(
        0, "steps between evaluations; 0: before the first and after the last step only", group="looking and saving"
    )
    save_steps: int = flag(0, "steps between restart points; 0 for none")
    resume: str | None = flag(None, "a restart point, or the output folder of a run, to go on from")
    print_answers_interval: int = flag(10, "steps between tables of samples; 0 for none")
    profile_steps: list[int] = flag(
        [],
        "steps, from 1, that torch.profiler records (and slows down): a trace a rank in OUTPUT_DIR/profile, which "
        "ui.perfetto.dev opens",
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        DataFlags.validate(self)
        self.at_least(
            1,
            "max_prompt_seq_len",
            "max_answer_seq_len",
            "per_device_generation_batch_size",
            "generation_batches",
            "num_samples_per_prompt",
            "per_device_training_batch_size",
            "gradient_accumulation_steps",
            "num_train_epochs",
            "max_steps",
            "ppo_epochs",
        )
        self.at_least(
            0,
            "num_eval_prompts",
            "critic_warmup_steps",
            "num_warmup_steps",
            "kl_coef",
            "max_grad_norm",
            "actor_weight_decay",
            "critic_weight_decay",
            "unsup_coef",
            "test_stop_step",
            "eval_steps",
            "save_steps",
            "print_answers_interval",
            "actor_learning_rate",
            "critic_learning_rate",
            "gamma",
            "lam",
            "ema_decay",
        )
        self.at_most(1, "gamma", "lam", "ema_decay")
        self.above(0, "temperature", "clip_range", "value_clip_range", "score_clip")
        self.finite(
            "temperature", "reward_function_weight", "reward_model_weight", "length_penalty", "missing_eos_penalty"
        )
        for name in ("actor_zero_stage", "critic_zero_stage"):
            if getattr(self, name) not in (None, 0, 1, 2, 3):
                raise UserError(f"--{name} {getattr(self, name)}: ZeRO has the stages 0, 1, 2 and 3.")
        if any(step < 1 for step in self.profile_steps):
            raise UserError(f"--profile_steps {min(self.profile_steps)}: steps are counted from 1.")
        self._validate_division()
        check_backend(self.rollout_backend)
        self._validate_decoding()
        if "" in self.stop:
            raise UserError("--stop '': an empty string stands at every place. Give strings of at least one character.")
        dialect, _ = self.resolved_dialect()
        check_sampling(self, dialect)
        self._validate_rewards(dialect)
        for name in ("actor_dropout", "critic_dropout"):
            if getattr(self, name):
                raise UserError(
                    f"--{name} {getattr(self, name)}: PPO compares the probabilities that a response had "
                    "when it was sampled with those that it has now, and dropout would change them by "
                    "itself. Leave it out, or give 0."
                )
        if self.unsupervised_dataset_config_name is not None and self.unsupervised_dataset_name is None:
            raise UserError(
                f"--unsupervised_dataset_config_name {self.unsupervised_dataset_config_name} needs "
                "--unsupervised_dataset_name."
            )
        if self.enable_test_mode != (self.test_stop_step > 0):
            raise UserError("--enable_test_mode and --test_stop_step N (1 or more) go together: give both or neither.")
        for name in ("ema_decay", "ema_device"):
            if getattr(self, name) is not None and not self.enable_ema:
                raise UserError(f"--{name} {getattr(self, name)} needs --enable_ema.")
        for role in ("reference", "reward"):
            path = getattr(self, f"{role}_ds_config")
            if path is not None and getattr(self, f"offload_{role}_model"):
                raise UserError(
                    f"--offload_{role}_model and --{role}_ds_config {path} contradict each other: say in "
                    "the file what is offloaded."
                )

    def _validate_decoding(self) -> None:
        if self.decoding not in ("recorded", "compiled"):
            return
        if self.replicas_between_steps != "keep":
            raise UserError(
                f"--decoding {self.decoding} with --replicas_between_steps {self.replicas_between_steps}: "
                "recorded and compiled passes belong to weights that stay where they are. Leave one of "
                "them out."
            )
        if self.rollout_backend == "zero3":
            raise UserError(
                f"--decoding {self.decoding} with --rollout_backend zero3: ZeRO's hooks cannot be "
                f"{self.decoding}. Leave one of them out."
            )

    def _validate_rewards(self, dialect: Dialect) -> None:
        role = "critic" if dialect.critic_start == "reward_model" else "reward"
        given = self.critic_model_name_or_path if role == "critic" else self.reward_path
        if self.reward_function is None and given is None:
            raise UserError(
                f"--{role}_model_name_or_path is missing: give the reward model's folder, or a function of "
                "your own with --reward_function."
            )
        if self.reward_function is None and self.reward_function_weight != 1.0:
            raise UserError(f"--reward_function_weight {self.reward_function_weight} needs --reward_function.")
        if self.reward_path is None:
            for name in ("reward_ds_config", "offload_reward_model"):
                if getattr(self, name):
                    raise UserError(
                        f"--{name} is given, but there is no reward model beside --reward_function. Name "
                        "one with --reward_model_name_or_path."
                    )
            if self.reward_model_weight != 1.0:
                raise UserError(
                    f"--reward_model_weight {self.reward_model_weight}: there is no reward model beside "
                    "--reward_function. Name one with --reward_model_name_or_path."
                )

    @property
    def reward_path(self) -> str | None:
        """The reward model's path; None where a function alone gives the scores."""
        if self.reward_model_name_or_path is not None or self.reward_function is not None:
            return self.reward_model_name_or_path
        return self.critic_model_name_or_path

    def _validate_division(self) -> None:
        made, mini_batches = self.rows_per_rank, self.mini_batches
        sizes = (
            f"each rank makes {made} responses a step (--per_device_generation_batch_size "
            f"{self.per_device_generation_batch_size} x --generation_batches {self.generation_batches} x "
            f"--num_samples_per_prompt {self.samples_per_prompt})"
        )
        if self.gradient_accumulation_steps is not None:
            step = self.per_device_training_batch_size * self.gradient_accumulation_steps
            if made % step:
                raise UserError(
                    f"batch sizes do not divide: {sizes}, which is no multiple of the {step} of an optimizer step "
                    f"(--per_device_training_batch_size {self.per_device_training_batch_size} x "
                    f"--gradient_accumulation_steps {self.gradient_accumulation_steps})."
                )
        elif made % mini_batches:
            raise UserError(
                f"batch sizes do not divide: {sizes}, which is no multiple of the dialect's mini_batches "
                f"{mini_batches}. Change the sizes, or --set mini_batches=N."
            )

    @property
    def samples_per_prompt(self) -> int:
        """Responses drawn for each prompt."""
        return self.resolved_dialect()[0].samples_per_prompt

    @property
    def rows_per_rank(self) -> int:
        """Responses that each rank makes in a step."""
        return self.per_device_generation_batch_size * self.generation_batches * self.samples_per_prompt

    @property
    def mini_batches(self) -> int:
        """Optimizer steps in one PPO epoch."""
        return self.resolved_dialect()[0].mini_batches

    def resolved_dialect(self) -> tuple[Dialect, dict[str, tuple]]:
        """The dialect with the given flags in it, and what they changed: {field: (dialect's, given)}."""
        named = get_dialect(self.dialect)
        resolved = named.replaced(**given_fields(self))
        return resolved, named.differences(resolved)

    def engine_spec(self, dialect: Dialect) -> EngineSpec:
        """Which engines are to be built; raises UserError where flags contradict the dialect or a DeepSpeed file."""
        return engines.engine_spec(self, dialect)

    def engine_configs(self, dialect: Dialect) -> dict[str, dict]:
        """Each engine's whole DeepSpeed configuration; raises UserError for a contradiction."""
        return engines.engine_configs(self, dialect)

    def stage(self, role: str) -> int:
        """The ZeRO stage of the actor or the critic."""
        given, path = getattr(self, f"{role}_zero_stage"), getattr(self, f"{role}_ds_config")
        if given is None and path is not None:
            given = stage_of_file(path, role)
        return given or 0
