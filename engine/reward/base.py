"""Where scores come from."""

import contextlib
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.experience import Rollout

COLUMNS = ("prompt", "response", "score", "kl", "tokens")
HELD_OUT = (
    *("score", "kl", "response_length", "new_words"),
    *("score_std", "distinct_responses", "distinct_bigrams", "compressed_bytes"),
)
OBJECTIVE = (
    *("kl", "kl_per_token", "kl_coef", "entropy", "rlhf_reward", "non_score_reward"),
    *("missing_eos_penalty", "overlong_penalty", "scores_learned", "reward_changed", "scores_histogram", "clipped"),
    "reference_moves",
)
TAKEN = frozenset(
    [*COLUMNS, *OBJECTIVE]
    + [
        f"{ema}{name}{ending}"
        for ema in ("", "ema_")
        for name in HELD_OUT
        for ending in ("", "_se", "_change", "_change_se")
    ]
)
"""What is measured of responses anyway: columns of samples, and metrics behind eval/ and
objective/."""


@runtime_checkable
class RewardSource(Protocol):
    """Scores whole responses: a reward model, a function, a server, or several of these together.

    A class of your own inherits from this one and writes `score`.
    """

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32, one number a response. All ranks call this together, each with its own responses."""

    def parts(self, rollout: Rollout) -> dict[str, Tensor]:
        """What adds up to the score, by the names that metrics and sample tables use, each (B,) float32.

        The names are none of `TAKEN`.
        """
        return {"scores": self.score(rollout).float()}

    def weights(self) -> Mapping[str, float]:
        """By which number each part is still to be multiplied, by its name, where that makes the score; none by
        default. What such a part is before it is measured, too, as that of what follows "scores_" in its name."""
        return {}

    def begin(self, rollout: Rollout) -> None:
        """These responses are done, and others are still drawn: what can be scored beside that may be. `score` follows
        for all of them, in whatever order, and this is called by each rank for itself. By default nothing is done."""
        return

    def prepare(self, rollout: Rollout) -> None:
        """These are all of this rank's responses that `score` is asked for next, in whatever order and parts: what
        takes its time elsewhere may begin, and go on while the other models compute. All ranks call this together. By
        default nothing is done."""
        return

    def on_device(self) -> contextlib.AbstractContextManager:
        """Context in which whatever is needed is on the device; by default nothing is."""
        return contextlib.nullcontext()
