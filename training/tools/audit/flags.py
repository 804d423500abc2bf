"""The flags of the audit program."""

from dataclasses import dataclass
from typing import ClassVar

from engine.errors import UserError
from training.config.flags import REQUIRED, flag
from training.tools.flags import RewardsFlags


@dataclass(kw_only=True)
class AuditFlags(RewardsFlags):
    """The flags that say which model responds to which prompts, and which rewards are audited."""

    program: ClassVar[str] = "audit"

    num_eval_prompts: int = flag(64, "held-out prompts that the model answers", least=2, group="measuring")
    sft_model_name_or_path: str = flag(REQUIRED, "SFT model that PPO would start from", group="models")
    num_samples_per_prompt: int = flag(
        32, "responses to each prompt, of which the best by each reward are shown", least=2
    )
    judge: str | None = flag(
        None,
        "function that judges responses, as --reward_function, and that no policy is trained by. By its scores the "
        "audit says which reward is the safest to optimise",
        group="rewards",
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        super().validate()
        if self.judge in self.reward_function:
            raise UserError(f"--judge {self.judge} is a --reward_function, too, and would judge itself. Give it once.")

    @property
    def functions(self) -> dict[str, str]:
        """{function: the flag that names it}: the reward functions, and the judge as the last one."""
        return super().functions | ({self.judge: "--judge"} if self.judge else {})
