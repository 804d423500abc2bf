"""A metric's curve in a run's records (its values, start, end and highest stretch), and a finding from it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

ALARM, LOOK, FINE = "alarm", "look", "fine"
"""The run is probably spoilt; it may be well, but look; nothing stood out."""
FEWEST_STEPS, SHARE = 8, 0.1
"""Fewer steps make no trend. Start and end of a run are its first and last tenth."""


@dataclass(frozen=True)
class Finding:
    """What stood out: `severity` is ALARM, LOOK or FINE, `text` says what was seen and what to try."""

    severity: str
    text: str


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
