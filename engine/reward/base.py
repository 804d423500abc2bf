"""Where scores come from."""

import contextlib
from typing import Protocol

from torch import Tensor

from engine.experience import Rollout


class RewardSource(Protocol):
    """Judges whole responses."""

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32, one number a response. All ranks call this together."""
        ...

    def on_device(self) -> contextlib.AbstractContextManager:
        """Context in which whatever is needed is on the device."""
        ...
