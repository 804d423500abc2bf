"""A run's progress: one bar in a terminal, now and then a plain line in a log file."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta

from tqdm import tqdm

FIRST_INTERVAL, LAST_INTERVAL = 15.0, 600.0
"""Seconds between lines in a log file, at a run's start and at most."""
LINES_A_RUN = 100
"""Between the two, a line for each such share of the time passed: some hundred lines a day, never thousands."""


class ProgressBar:
    """The run's progress on stderr: a bar in a terminal; elsewhere (a log file) plain lines, ever less often.

    Both show the rate and the time left, from the steps of this process only: those before a resume took none of its
    time. `shown`: label -> metric. unit: what is counted. below: by how much steps are numbered lower than they count.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        shown: Mapping[str, str],
        first_step: int = 0,
        unit: str = "step",
        below: int = 0,
        stream=None,
        clock=time.monotonic,
    ):
        self._stream = sys.stderr if stream is None else stream
        self._total, self._first, self._shown, self._clock = total_steps, first_step, shown, clock
        self._unit, self._below = unit, below
        self._started = self._due = clock()
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=total_steps, initial=first_step, unit=unit, file=self._stream, dynamic_ncols=True)

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Show how far the run has come, and the shown ones of its metrics."""
        step += self._below
        shown = {label: short(metrics[name]) for label, name in self._shown.items() if name in metrics}
        if self._bar is None:
            self._log_line(step, shown)
            return
        if shown:
            # As one text: given numbers in texts, tqdm would write them anew in its own way.
            self._bar.set_postfix_str(", ".join(f"{label} {value}" for label, value in shown.items()), refresh=False)
        self._bar.update(step - self._bar.n)
        self._bar.refresh()

    def _log_line(self, step: int, shown: Mapping[str, str]) -> None:
        now = self._clock()
        if now < self._due and step < self._total:
            return
        passed = now - self._started
        self._due = now + min(max(passed / LINES_A_RUN, FIRST_INTERVAL), LAST_INTERVAL)
        line = f"{self._unit} {step}/{self._total} ({step / max(self._total, 1):.0%})"
        if step > self._first:
            seconds = passed / (step - self._first)
            left = timedelta(seconds=round(seconds * (self._total - step)))
            line += f", {short(seconds)} s/{self._unit}, {left} left"
        self.write(", ".join([line, *(f"{label} {value}" for label, value in shown.items())]))

    def write(self, text: str) -> None:
        """Print `text` above the bar."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def short(value: float) -> str:
    """`value` with three significant digits: 1.25, 24.0, 3.00e-04; whole numbers up to 99999 in full."""
    size = abs(value)
    if size and not 1e-3 <= size < 1e5:
        return f"{value:.2e}"
    return f"{value:.0f}" if size >= 100 or not size else f"{value:#.3g}".rstrip(".")
