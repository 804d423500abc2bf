"""A metric's curve in a run's records (its values, start, end and highest stretch), and a finding from it."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

ALARM, LOOK, FINE = "alarm", "look", "fine"
"""The run is probably spoilt; it may be well, but look; nothing stood out."""
FEWEST_STEPS, SHARE = 8, 0.1
"""Fewer steps make no trend. Start and end of a run are its first and last tenth."""
NOISE = 2.0
"""Standard errors by which two means must differ to count as different."""
SETTLED_FROM, STEADY = 1 / 3, 0.05
"""What has settled has done so for two thirds of the run: over the last third alone the learning rate's schedule, which
ends at 0, makes any curve flat. A twentieth up or down is steady, however little noise there is."""


@dataclass(frozen=True)
class Finding:
    """What stood out: `severity` is ALARM, LOOK or FINE; `seen` in numbers, and the `advice` on what to try."""

    severity: str
    seen: str
    advice: str = ""

    @property
    def text(self) -> str:
        """Both as sentences."""
        return f"{self.seen}. {self.advice}" if self.advice else self.seen

    def with_signs(self, signs: "Sequence[Finding]") -> "Finding":
        """The same with what else was seen of it, as severe as the worst of them."""
        if not signs:
            return self
        severity = ALARM if ALARM in (self.severity, *(sign.severity for sign in signs)) else self.severity
        return Finding(severity, f"{self.seen}. With it: {'; '.join(sign.seen for sign in signs)}", self.advice)


def at_steps(steps: Sequence[int]) -> str:
    """Where something was seen: the first few steps by number."""
    shown = ", ".join(map(str, steps[:3]))
    return f"at step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {len(steps) - 3} more" if len(steps) > 3 else "")


def having(rows: Sequence[Mapping], name: str) -> list[Mapping]:
    """The rows in which a metric is finite."""
    return [row for row in rows if math.isfinite(row.get(name, math.nan))]


def column(rows: Sequence[Mapping], name: str) -> list[float]:
    """The finite values of a metric, in order."""
    return [row[name] for row in having(rows, name)]


def mean(rows: Sequence[Mapping], name: str, begin: float, end: float) -> float | None:
    """The mean of a metric's values between two shares of the way through; at least of one value."""
    values = column(rows, name)
    first = min(int(begin * len(values)), len(values) - 1)
    return fmean(values[first : max(int(end * len(values)), first + 1)]) if values else None


def at_start(rows: Sequence[Mapping], name: str) -> float | None:
    """The mean over the first tenth."""
    return mean(rows, name, 0.0, SHARE)


def at_end(rows: Sequence[Mapping], name: str) -> float | None:
    """The mean over the last tenth."""
    return mean(rows, name, 1.0 - SHARE, 1.0)


def noise(values: Sequence[float]) -> float:
    """The standard deviation of a curve around its own course, by the differences of neighbours; 2 values at least."""
    return (fmean((b - a) ** 2 for a, b in itertools.pairwise(values)) / 2) ** 0.5


@dataclass(frozen=True)
class Course:
    """Where a curve went over the last part of a run: the means of that part's two halves, and what of their difference
    is noise (NOISE standard errors)."""

    before: float
    after: float
    error: float

    @property
    def rose(self) -> bool:
        """By more than noise."""
        return self.after - self.before > self.error

    @property
    def fell(self) -> bool:
        """By more than noise."""
        return self.before - self.after > self.error

    @property
    def steady(self) -> bool:
        """Within noise, or nearly."""
        return abs(self.after - self.before) <= max(self.error, STEADY * abs(self.after))


def course(rows: Sequence[Mapping], name: str, begin: float) -> Course | None:
    """The course of a metric from a share of the way on; None where that part has fewer than 4 values."""
    values = column(rows, name)
    values = values[int(begin * len(values)) :]
    half = len(values) // 2
    if half < 2:
        return None
    return Course(fmean(values[:half]), fmean(values[-half:]), NOISE * noise(values) * (2 / half) ** 0.5)


def sustained(
    rows: Sequence[Mapping], name: str, threshold: float, finding: Callable[[float, str], Finding]
) -> Finding | None:
    """`finding` of the highest mean over a tenth of the run (3 steps at least), where that is above the threshold."""
    present = having(rows, name)
    width = max(3, int(SHARE * len(present)))
    windows = [present[i : i + width] for i in range(len(present) - width + 1)]
    if not windows:
        return None
    window = max(windows, key=lambda window: fmean(column(window, name)))
    value = fmean(column(window, name))
    return finding(value, f"steps {window[0]['step']}-{window[-1]['step']}") if value > threshold else None
