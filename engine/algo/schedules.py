"""Learning-rate schedules, and the table from which a run chooses one.

A new schedule is one line of SCHEDULES: a function from progress (the fraction of the steps after warm-up that is done,
0 to 1) to the factor that the peak learning rate is multiplied by. Names are those of transformers.
"constant_with_warmup" and "cosine_with_restarts" (with one cycle) mean what they mean in transformers. Unlike in
transformers, "constant" warms up too if warm-up steps are given.
"""

import math
from collections.abc import Callable


def constant(progress: float) -> float:
    """The peak learning rate in every step."""
    return 1.0


def linear(progress: float) -> float:
    """A linear decrease from the peak learning rate to 0."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """A decrease from the peak learning rate to 0 along half a cosine wave."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": linear,
    "cosine": cosine,
    "constant": constant,
    "constant_with_warmup": constant,
    "cosine_with_restarts": cosine,
}


def lr_factor(step: int, total: int, warmup: int, schedule: str, warmup_from_zero: bool = False) -> float:
    """The factor that multiplies the peak learning rate at optimizer step `step` (counted from 0) of `total` steps.

    In the first `warmup` steps the factor grows linearly. It begins at 1 / warmup, since a step with learning rate 0
    changes nothing; with `warmup_from_zero` it begins at 0, as in transformers' schedules. After the warm-up it follows
    the schedule.

    Raises: KeyError for an unknown schedule.
    """
    if step < warmup:
        return (step + (not warmup_from_zero)) / warmup
    return SCHEDULES[schedule](min((step - warmup) / max(1, total - warmup), 1.0))
