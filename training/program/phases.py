"""Where this process is in its run, for messages about it: the phase, since when, and the step."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

OUTSIDE = "outside of training"
# Phases in which one rank may be busy for as long as it takes, while the others wait for it.
ALONE = (OUTSIDE, "reading data", "loading models", "writing a restart point", "saving models")


@dataclass
class Place:
    """step: the one that is being trained, from 1; 0 before. since: by time.time(). told: called at each new phase."""

    phase: str = OUTSIDE
    step: int = 0
    since: float = field(default_factory=time.time)
    told: Callable[[], None] = field(default=lambda: None)

    def enter(self, phase: str) -> None:
        """Go on with a phase."""
        self.phase, self.since = phase, time.time()
        self.told()


place = Place()
"""This process's."""


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what the block does; what was done before goes on behind it."""
    before = place.phase
    place.enter(name)
    try:
        yield
    finally:
        place.enter(before)
