"""The flags of steps 1 and 2."""

from dataclasses import dataclass
from typing import ClassVar

from engine import distributed
from engine.algo.schedules import SCHEDULES
from engine.algorithms import Dialect
from engine.engine_spec import OptimizerSpec
from engine.errors import UserError, in_words
from engine.options import default_of
from engine.zero.config import EngineConfig, build_ds_config, chosen_stage
from training.config import other_systems
from training.config.flags import REQUIRED, DataFlags, HubFlags, RestartFlags, flag
from training.config.models import ModelLoraFlags


@dataclass(kw_only=True)
class SupervisedFlags(HubFlags, RestartFlags, ModelLoraFlags, DataFlags):
    """The flags that steps 1 and 2 share."""

    old_flags: ClassVar[dict[str, type]] = other_systems.SUPERVISED

    held_out: float = flag(
        0.05,
        "how much of --data_path is held out if no other rows are: a fraction, or a number of rows",
        above=0,
        group="training",
    )
    model_name_or_path: str = flag(REQUIRED, "model to start from")
    dropout: float = flag(0.0, "dropout of the model in training", least=0, below=1)
    max_seq_len: int = flag(512, "longest sequence of prompt and answer, in tokens", least=2)
    per_device_train_batch_size: int = flag(16, "examples per rank in one forward and backward pass", least=1)
    per_device_eval_batch_size: int = flag(16, "held-out examples per rank in one forward pass", least=1)
    gradient_accumulation_steps: int = flag(1, "forward and backward passes in one optimizer step", least=1)
    num_train_epochs: int = flag(1, "passes over the data", least=1)
    max_steps: int | None = flag(None, "optimizer steps to train; replaces --num_train_epochs", least=1)
    learning_rate: float = flag(1e-5, "peak learning rate", least=0)
    weight_decay: float = flag(0.0, "weight decay of AdamW, applied to matrices only", least=0)
    lr_scheduler_type: str = flag("linear", "schedule of the learning rate", choices=SCHEDULES)
    num_warmup_steps: int = flag(0, "optimizer steps in which the learning rate rises to its peak", least=0)
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm; 0: no clipping", least=0)
    eval_interval: int = flag(
        0,
        "optimizer steps between evaluations, beside those before the first step, after each epoch and after the last "
        "step; 0: none",
        least=0,
    )
    zero_stage: int | None = flag(
        None, "ZeRO stage (default 0; on a single GPU in 16 bits 1)", least=0, most=3, group="engine"
    )
    offload: bool = flag(
        False, "keep optimizer states (at stage 3 also parameters) of models that train in host memory"
    )
    ds_config: str | None = flag(None, "DeepSpeed JSON file, in place of one of configs/ds")
    gradient_checkpointing: bool = flag(False, "recompute activations in backward passes, to save memory")

    def validate(self) -> None:
        """Raise UserError for values that cannot work."""
        super().validate()
        self.check_rate("", self.learning_rate)

    def engine_config(self) -> EngineConfig:
        """The engine's settings, from the flags."""
        stage = chosen_stage(self.zero_stage, self.ds_config, "model", self.dtype, self.gpus)
        return EngineConfig("model", stage, self.offload, self.ds_config)

    def ds_settings(self) -> dict:
        """The complete DeepSpeed configuration. Raises UserError if flags and the DeepSpeed file contradict each
        other."""
        self.engine_config().check_offload()
        return build_ds_config(
            self.engine_config(),
            dtype=self.dtype,
            micro_batch_size=self.per_device_train_batch_size,
            gradient_clipping=self.max_grad_norm,
        )

    def optimizer(self) -> OptimizerSpec:
        """The settings of AdamW, from the flags."""
        return OptimizerSpec(lr=self.learning_rate, weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm)

    def steps_per_epoch(self, examples: int) -> int:
        """The number of optimizer steps in one epoch. examples: number of training examples. Raises UserError if they
        are too few for one optimizer step."""
        ranks = distributed.data_parallel_size()
        a_step = self.per_device_train_batch_size * ranks * self.gradient_accumulation_steps
        steps = examples // a_step
        if steps == 0:
            raise UserError(
                f"--data_path {' '.join(self.data_path)}: {examples} examples are too few for one optimizer step, "
                f"which takes {a_step} over {in_words(ranks, 'rank')}. Lower --per_device_train_batch_size or add data."
            )
        return steps

    def total_steps(self, examples: int) -> int:
        """The number of optimizer steps of the whole run. Raises UserError as `steps_per_epoch` does."""
        an_epoch = self.steps_per_epoch(examples)
        return self.max_steps or an_epoch * self.num_train_epochs

    def evaluates(self, step: int, examples: int) -> bool:
        """Whether the held-out examples are evaluated after step number `step`. examples: number of training
        examples."""
        if step % self.steps_per_epoch(examples) == 0 or step == self.total_steps(examples):
            return True
        return bool(self.eval_interval and step % self.eval_interval == 0)


@dataclass(kw_only=True)
class SFTFlags(SupervisedFlags):
    """The flags of step 1."""

    phase: ClassVar[int] = 1

    sft_only_data_path: list[str] = flag(
        [], "data sets for step 1 alone, which --data_split does not divide", group="step 1"
    )
    loss_on: str = flag(
        "response",
        "tokens that count in the loss: those of the response, or all of prompt and response",
        choices=("response", "all"),
    )


@dataclass(kw_only=True)
class RewardFlags(SupervisedFlags):
    """The flags of step 2."""

    phase: ClassVar[int] = 2

    step_end: str | None = flag(
        None,
        "train a process reward model on records with prompt, completions and labels, whose steps end with this text "
        "(\\n is a new line, TRL's default). By default records are pairs",
        group="step 2",
    )
    pairwise_loss: str = flag(
        "last_token",
        "scores of a pair that are compared. last_token: those of the last tokens. from_difference: those of all "
        "tokens from the first that differs, as in DeepSpeed-Chat",
        choices=("last_token", "from_difference"),
    )
    sft_model_name_or_path: str | None = flag(
        None, "SFT model on whose responses scores get mean 0 and variance 1; by default --model_name_or_path"
    )
    normalization_data_path: list[str] = flag(
        [], "prompts of the responses for normalisation; by default those of --data_path"
    )
    normalization_samples: int = flag(512, "responses that scores are normalised on; 0: no normalisation", least=0)
    normalize_before: bool = flag(
        False,
        "also scale the new head before training, so that scores begin with variance 1 (lm-human-preferences)",
        only_with="normalization_samples",
    )
    max_prompt_seq_len: int = flag(256, "longest prompt in normalisation, in tokens", least=1)
    max_answer_seq_len: int = flag(
        256, "longest response in normalisation, in tokens; give the value of step 3", least=1
    )
    temperature: float = flag(Dialect().temperature, "sampling temperature in normalisation", above=0)

    def validate(self) -> None:
        """Raise UserError for values that cannot work, and for flags that a process reward model does not use."""
        super().validate()
        of_pairs = (
            *("pairwise_loss", "sft_model_name_or_path", "normalize_before"),
            *("normalization_data_path", "normalization_samples"),
        )
        idle = [name for name in of_pairs if getattr(self, name) != default_of(type(self).__dataclass_fields__[name])]
        if self.step_end is not None and idle:
            raise UserError(
                f"{self.word(idle[0])} with --step_end: a process reward model learns from labels of steps, and its "
                "numbers are probabilities, which nothing normalises. Leave one of the two out."
            )

    def counted_padding(self) -> str | None:
        """See RunFlags: one loss compares a pair up to the end of its longer response, so it uses outputs at the
        shorter one's padding."""
        return "from_difference counts numbers of padding" if self.pairwise_loss == "from_difference" else None

    @property
    def step_end_text(self) -> str:
        """The value of --step_end, in which the two characters \\n are a new line."""
        return (self.step_end or "").replace("\\n", "\n")

    @property
    def normalizes(self) -> bool:
        """Whether scores are normalised after training."""
        return self.step_end is None and self.normalization_samples > 0

    @property
    def sft_path(self) -> str:
        """The path of the model on whose responses the scores are normalised."""
        return self.sft_model_name_or_path or self.model_name_or_path
