"""Where this process is in its run, for messages about it: the phase, since when, the step; how long phases took."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil

OUTSIDE = "outside of training"
# Phases in which one rank may be busy for as long as it takes, while the others wait for it.
# Normalising, ranks sample responses apart.
ALONE = (
    OUTSIDE,
    "reading data",
    "loading models",
    "writing a restart point",
    "normalising",
    "saving models",
    "uploading",
)


@dataclass
class Place:
    """step: the one that is being trained, from 1; 0 before. since: by time.time(). told: called at each new phase."""

    phase: str = OUTSIDE
    step: int = 0
    since: float = field(default_factory=time.time)
    told: Callable[[], None] = field(default=lambda: None)
    _seconds: dict[str, float] = field(default_factory=dict)
    _counted: float = field(default_factory=time.monotonic)

    def enter(self, phase: str) -> None:
        """Go on with a phase."""
        self._count()
        self.phase, self.since = phase, time.time()
        self.told()

    def take_seconds(self) -> dict[str, float]:
        """Seconds of each phase since the last call, or since the process began; they add up to all that have passed.

        Time in a phase within another one is the inner one's.
        """
        self._count()
        taken, self._seconds = self._seconds, {}
        return taken

    def _count(self) -> None:
        now = time.monotonic()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._counted
        self._counted = now


def _began() -> float:
    """When this process began, by time.monotonic(): its imports are part of the run."""
    return time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())


place = Place(_counted=_began())
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
