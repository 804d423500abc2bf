"""Learning-rate schedules, and the table from which a run chooses one.

A new schedule is one line of SCHEDULES: a function from progress (the share of the steps after warm-up that is done, 0
to 1) to the factor of the peak rate. Names are those of transformers. "constant_with_warmup" and "cosine_with_restarts"
(of one cycle) mean the same as there. "constant" warms up too if warm-up steps are given.
"""

import math
from collections.abc import Callable


def constant(progress: float) -> float:
    """The peak rate throughout."""
    return 1.0


def linear(progress: float) -> float:
    """From the peak to 0 along a line."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """From the peak to 0 along half a wave."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": linear,
    "cosine": cosine,
    "constant": constant,
    "constant_with_warmup": constant,
    "cosine_with_restarts": cosine,
}


def depends_on_total(schedule: str) -> bool:
    """Whether the learning rate of a step depends on the number of steps of the run."""
    return SCHEDULES[schedule] is not constant


def lr_factor(step: int, total: int, warmup: int, schedule: str, warmup_from_zero: bool = False) -> float:
    """What the peak learning rate is multiplied by at optimizer step `step` (from 0) of `total`.

    In the `warmup` steps the factor grows linearly. It begins at 1 / warmup, since a step of rate 0 is a step lost;
    with `warmup_from_zero` it begins at 0, as in transformers' schedules. Then it follows the schedule.

    Raises: KeyError for an unknown schedule.
    """
    if step < warmup:
        return (step + (not warmup_from_zero)) / warmup
    return SCHEDULES[schedule](min((step - warmup) / max(1, total - warmup), 1.0))
