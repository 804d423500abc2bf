"""When restart points are written, and which of them are kept."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """When restart points are written and which are kept.

    steps, minutes: between points; 0 for none by this count. keep: the newest so many; 0 for all. keep_best: the one of
    the best held-out score too. asynchronous: whether training goes on while a point is written.
    """

    steps: int = 0
    minutes: float = 0.0
    keep: int = 0
    keep_best: bool = False
    asynchronous: bool = True
