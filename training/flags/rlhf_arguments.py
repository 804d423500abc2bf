"""The flags of step 3."""

from dataclasses import dataclass
from typing import ClassVar

from engine.algorithms import Dialect
from engine.errors import UserError
from training.flags import deepspeed_chat
from training.flags.arguments import OldFlag, flag
from training.flags.hub_flags import HubFlags
from training.flags.model_flags import ModelFlags
from training.flags.restart_flags import RestartFlags
from training.flags.rollout_flags import RolloutFlags


@dataclass(kw_only=True)
class RLHFFlags(HubFlags, RestartFlags, RolloutFlags, ModelFlags):
    """Step 3: the algorithm's flags, the models', and those of prompts, lengths, rollouts and restart points."""

    phase: ClassVar[int] = 3
    old_flags: ClassVar[dict[str, OldFlag]] = deepspeed_chat.STEP3

    max_prompt_seq_len: int = flag(256, "longest prompt, in tokens", group="lengths")
    max_answer_seq_len: int = flag(256, "longest response, in tokens")
    stop: list[str] = flag([], "strings that end a response, beside the tokens that do")
    num_train_epochs: int = flag(1, "passes over the prompts")
    max_steps: int | None = flag(None, "steps to train, instead of --num_train_epochs")
    enable_test_mode: bool = flag(False, "end after --test_stop_step steps, with learning rates as for the whole run")
    test_stop_step: int = flag(0, "after how many steps --enable_test_mode ends the run")

    unsupervised_dataset_name: str | None = flag(
        None,
        "texts that the actor goes on learning as language (mixed pretraining): a data set as in --data_path",
        group="mixed pretraining",
    )
    unsupervised_dataset_config_name: str | None = flag(None, "which configuration of that data set")
    unsup_coef: float = flag(
        27.8, "coefficient of the loss on these texts: gamma in equation 2 of the InstructGPT paper"
    )

    num_eval_prompts: int = flag(
        128, "how many held-out prompts are answered at each evaluation; 0 for none", group="looking and saving"
    )
    eval_steps: int = flag(0, "steps between evaluations; 0: before the first and after the last step only")
    print_answers_interval: int = flag(10, "steps between tables of samples; 0 for none")
    profile_steps: list[int] = flag(
        [],
        "steps, from 1, that torch.profiler records (and slows down): a trace a rank in OUTPUT_DIR/profile, which "
        "ui.perfetto.dev opens",
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        ModelFlags.validate(self)
        RestartFlags.validate(self)
        self.validate_hub()
        self.at_least(1, "max_prompt_seq_len", "max_answer_seq_len", "num_train_epochs", "max_steps")
        self.at_least(
            0,
            "num_eval_prompts",
            "unsup_coef",
            "test_stop_step",
            "eval_steps",
            "print_answers_interval",
        )
        if any(step < 1 for step in self.profile_steps):
            raise UserError(f"--profile_steps {min(self.profile_steps)}: steps are counted from 1.")
        dialect = self.resolved_dialect()[0]
        self.validate_rollouts()
        self._validate_ends(dialect)
        if self.unsupervised_dataset_config_name is not None and self.unsupervised_dataset_name is None:
            raise UserError(
                f"--unsupervised_dataset_config_name {self.unsupervised_dataset_config_name} needs "
                "--unsupervised_dataset_name."
            )
        if self.enable_test_mode != (self.test_stop_step > 0):
            raise UserError("--enable_test_mode and --test_stop_step N (1 or more) go together: give both or neither.")

    @classmethod
    def no_flag(cls, name: str, value: str) -> str | None:
        """Also for the name that --overlong had when step 3 alone had it."""
        if name == "overlong_prompts":
            return f"Give --overlong {'cut_prompt' if value == 'truncate' else value}, which all three steps have."
        return super().no_flag(name, value)

    def _validate_ends(self, dialect: Dialect) -> None:
        if "" in self.stop:
            raise UserError("--stop '': an empty string stands at every place. Give strings of at least one character.")
        if self.stop and dialect.sampling != "until_eos":
            raise UserError(
                f"--stop {' '.join(self.stop)}: the dialect's sampling is {dialect.sampling!r}, which gives "
                "every response the same length. Leave it out, or --set sampling=until_eos."
            )
        if dialect.truncate_after >= self.max_answer_seq_len:
            raise UserError(
                f"truncate_after {dialect.truncate_after} with --max_answer_seq_len "
                f"{self.max_answer_seq_len}: no response reaches that slot, so none would have an end. Raise "
                "the one, or lower the other with --set truncate_after=N."
            )
