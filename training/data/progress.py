"""How far a long passage through the data has come: a line now and then, for people and for processes that wait."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

Item = TypeVar("Item")
FIRST, LAST = 15.0, 300.0  # seconds between lines, at the beginning and at most
LINES = 50  # between the two, a line for each such share of the time passed
EACH = 1000  # items between looks at the clock


def say(line: str) -> None:
    """Print the line on stderr, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts items that are gone through, and says how fast that goes and how long it will take.

    what: is done to the items. noun: what they are. told: called with each line beside `say`.
    """

    def __init__(
        self,
        total: int,
        what: str,
        noun: str = "rows",
        told: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.what, self.noun, self.told, self.clock = total, what, noun, told, clock
        self.done = 0
        self._started = clock()
        self._due = self._started + FIRST

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, counted as they are asked for."""
        for item in items:
            yield item
            self.done += 1
            if self.done % EACH == 0 and self.clock() >= self._due:
                self._line()

    def _line(self) -> None:
        passed = self.clock() - self._started
        self._due = self.clock() + min(max(passed / LINES, FIRST), LAST)
        rate = self.done / passed
        left = timedelta(seconds=round((self.total - self.done) / rate))
        line = (
            f"{self.what}: {self.done:,} of {self.total:,} {self.noun} ({self.done / self.total:.0%}), "
            f"{rate:,.0f} {self.noun}/s, {left} left"
        )
        say(line)
        self.told(line)
