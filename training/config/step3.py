"""The flags of step 3 (how responses are drawn, how long training lasts, what is evaluated) and of the memory planner.
The memory planner has step 3's flags, and further flags that describe the machines.
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.algorithms import check_conversations
from engine.errors import UserError
from engine.rollout import DECODING, ROLLOUT_BACKENDS, SAMPLERS
from training.config import other_systems
from training.config.flags import HubFlags, RestartFlags, RunFlags, flag, refuse_uneven
from training.config.models import SCORE, ModelFlags

COPIES = "rollout_backend=auto|replica|zero3"  # the backends that sample from the actor in the training processes


@dataclass(kw_only=True)
class RolloutFlags(RunFlags):
    """The flags of the backend that draws responses."""

    rollout_backend: str = flag(
        "auto",
        "what draws responses (docs/rollouts.md). replica: a whole copy of the actor on each rank. zero3: the actor's "
        "ZeRO-3 partitions. vllm: vLLM, in these processes. auto: a copy on each rank if it fits in memory, else one "
        "that several ranks hold together; the run ends at its start if none fits",
        choices=ROLLOUT_BACKENDS,
        group="rollouts",
    )
    decoding: str = flag(
        "auto",
        "how a whole copy computes single tokens. plain: by the model's own code. recorded: by a recording of its "
        "operations. graphs: by CUDA graphs. auto: graphs on GPUs, recorded on CPUs",
        choices=DECODING,
        only_with=COPIES,
    )
    replicas_between_steps: str = flag(
        "keep",
        "whether keys and values, and with --actor_zero_stage 3 the actor's copy, stay in memory while models train "
        "(keep), or are freed (free), which makes --decoding plain",
        choices=("keep", "free"),
        only_with=COPIES,
    )
    inference_tp_size: int | None = flag(
        None,
        "with --actor_zero_stage 3: number of neighbouring ranks of a node that hold the actor's copy together (tensor "
        "parallelism); by default as few as memory allows (auto), or 1 (replica)",
        least=1,
        only_with="rollout_backend=auto|replica",
    )
    vllm_tensor_parallel_size: int = flag(
        1,
        "number of neighbouring ranks of a node over which vLLM divides the actor",
        least=1,
        only_with="rollout_backend=vllm",
    )
    vllm_sampler: str = flag(
        "keyed",
        "what draws tokens in vLLM. keyed: our random numbers, which give the responses of the other backends, up to "
        "rounding. own: vLLM's sampler",
        choices=SAMPLERS,
        only_with="rollout_backend=vllm",
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, by themselves or in combination."""
        super().validate()
        if self.decoding in ("recorded", "graphs") and self.replicas_between_steps != "keep":
            raise UserError(
                f"{self.word('decoding')} with {self.word('replicas_between_steps')}: such passes belong to weights "
                "that stay where they are. Leave one of them out."
            )
        if self.decoding in ("recorded", "graphs") and self.rollout_backend == "zero3":
            raise UserError(
                f"{self.word('decoding')} with --rollout_backend zero3: ZeRO's hooks cannot be {self.decoding}. Leave "
                "one of them out."
            )

    def check_groups(self, ranks: int) -> None:
        """See RunFlags."""
        super().check_groups(ranks)
        name = {"replica": "inference_tp_size", "vllm": "vllm_tensor_parallel_size"}.get(self.rollout_backend)
        if name is not None:
            refuse_uneven(ranks, name, getattr(self, name))


@dataclass(kw_only=True)
class RLHFFlags(HubFlags, RestartFlags, RolloutFlags, ModelFlags):
    """All flags of step 3: those of the algorithm, the models, prompts, lengths, rollouts and checkpoints."""

    phase: ClassVar[int] = 3
    old_flags: ClassVar[dict[str, type]] = other_systems.STEP3

    max_prompt_seq_len: int = flag(256, "longest prompt, in tokens", least=1, group="lengths")
    max_answer_seq_len: int = flag(256, "longest response, in tokens", least=1)
    stop: list[str] = flag([], "strings that end a response, in addition to end tokens")
    num_train_epochs: int = flag(1, "passes over the data", least=1)
    max_steps: int | None = flag(None, "steps to train; replaces --num_train_epochs", least=1)
    enable_test_mode: bool = flag(
        False, "end after --test_stop_step steps; learning rates are those of the whole run", only_with="test_stop_step"
    )
    test_stop_step: int = flag(
        0, "steps after which --enable_test_mode ends the run", least=0, only_with="enable_test_mode"
    )

    unsupervised_dataset_name: str | None = flag(
        None,
        "texts that the actor also learns as a language model (mixed pretraining), given as in --data_path",
        group="mixed pretraining",
    )
    unsupervised_dataset_config_name: str | None = flag(
        None, "configuration of --unsupervised_dataset_name on the Hub", only_with="unsupervised_dataset_name"
    )
    unsup_coef: float = flag(
        27.8,
        "coefficient of the loss of mixed pretraining: gamma in equation 2 of the InstructGPT paper",
        least=0,
        only_with="unsupervised_dataset_name",
    )

    num_eval_prompts: int = flag(
        128,
        "held-out prompts that are answered at each evaluation; 0: no evaluation",
        least=0,
        group="looking and saving",
    )
    eval_steps: int = flag(0, "steps between evaluations; 0: only before the first step and after the last", least=0)
    print_answers_interval: int = flag(10, "steps between printed tables of samples; 0: none", least=0)
    profile_steps: list[int] = flag(
        [],
        "numbers of steps, from 1, that torch.profiler records, which slows them down: a trace for each rank in "
        "OUTPUT_DIR/profile, for ui.perfetto.dev",
        least=1,
    )
    keep_best_by: str = flag(
        SCORE,
        "held-out number by which --keep_best_checkpoint compares, the larger the better: eval/score, or "
        "eval/reward_NAME of one of several rewards, also of one with weight 0",
        only_with="keep_best_checkpoint",
        group="checkpoints",
    )
    keep_best_max_kl: float | None = flag(
        None,
        "--keep_best_checkpoint keeps none whose held-out KL to the reference is above this many nats per response",
        above=0,
        only_with="keep_best_checkpoint",
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, by themselves or in combination."""
        super().validate()
        dialect = self.resolved.dialect
        if (self.inference_tp_size or 1) > 1 and self.stage("actor") < 3:
            raise UserError(
                f"{self.word('inference_tp_size')} with the actor at ZeRO stage {self.stage('actor')}: each rank has "
                "the whole actor, and draws from it. Give --actor_zero_stage 3, or leave it out."
            )
        if self.overlap_rewards and self.rollout_backend not in ("auto", "replica", "zero3"):
            raise UserError(
                f"--overlap_rewards with --rollout_backend {self.rollout_backend}: that gives no response before all "
                "are done. Leave it out."
            )
        # A dialect that counts padding is refused by `attention`: these fields would not help it.
        if self.sequence_parallel_size > 1 and dialect.micro_batches_matter and not dialect.counts_padding:
            raise UserError(
                f"{self.word('sequence_parallel_size')}: the dialect {dialect.name} averages within micro-batches, and "
                "the ranks of a group share theirs. Leave it out, or give --set loss_scope=optimizer_step "
                "advantages_at=rollout."
            )
        if self.environment is not None:
            check_conversations(dialect)
        if "" in self.stop:
            raise UserError("--stop '': an empty string stands at every place. Give strings of at least one character.")
        if self.stop and dialect.sampling != "until_eos":
            raise UserError(
                f"{self.word('stop')}: the dialect's sampling is {dialect.sampling!r}, which gives every response the "
                "same length. Leave it out, or --set sampling=until_eos."
            )
        if dialect.truncate_after >= self.max_answer_seq_len:
            raise UserError(
                f"truncate_after {dialect.truncate_after} with {self.word('max_answer_seq_len')}: no response reaches "
                "that position, so none would have an end. Raise the one, or lower the other with --set "
                "truncate_after=N."
            )
