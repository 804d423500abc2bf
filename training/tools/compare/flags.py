"""The flags of the comparison program."""

from dataclasses import dataclass
from typing import ClassVar

from engine.errors import UserError
from training.config.flags import REQUIRED, flag
from training.tools.flags import RewardsFlags
from training.tools.models import named


@dataclass(kw_only=True)
class CompareFlags(RewardsFlags):
    """The flags that say which models are compared, on which prompts, and by which rewards. The first reward decides
    the order."""

    program: ClassVar[str] = "comparison"

    num_eval_prompts: int = flag(256, "held-out prompts that each model answers", least=2, group="measuring")
    models: list[str] = flag(
        REQUIRED,
        "two or more models, as NAME=PATH or PATH: folders of models, adapters or runs (their actor), checkpoints, or "
        "names on the Hub. The others are compared with the first",
        group="models",
    )
    num_samples_per_prompt: int = flag(1, "responses of each model to each prompt", least=1)
    greedy: bool = flag(False, "take the most likely token instead of sampling")

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        super().validate()
        paths = named(self.models)
        if len(paths) < 2:
            raise UserError(
                f"--models {' '.join(self.models)}: that is one model. Give two or more, the first of "
                "which the others are compared with."
            )
        if self.greedy and self.temperature != 1.0:
            raise UserError(
                f"--greedy and --temperature {self.temperature:g}: greedily nothing is drawn. Give one of them."
            )
        if self.greedy and self.num_samples_per_prompt > 1:
            raise UserError(
                f"--greedy with --num_samples_per_prompt {self.num_samples_per_prompt}: all of them would be the same. "
                "Leave one of them out."
            )

    def read_paths(self) -> dict[str, list[str]]:
        """{flag: the models or data sets that the program reads}, including the compared models."""
        return {"models": list(named(self.models).values()), **super().read_paths()}
