"""Where scores come from."""

import contextlib
from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.experience import Rollout


@runtime_checkable
class RewardSource(Protocol):
    """Scores whole responses: a reward model, a function, a server, or several of these together.

    A class of your own inherits from this one and writes `score`.
    """

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32, one number a response. All ranks call this together, each with its own responses."""

    def parts(self, rollout: Rollout) -> dict[str, Tensor]:
        """What adds up to the score, by the names that metrics and sample tables use, each (B,) float32."""
        return {"scores": self.score(rollout).float()}

    def on_device(self) -> contextlib.AbstractContextManager:
        """Context in which whatever is needed is on the device; by default nothing is."""
        return contextlib.nullcontext()
