"""The whole time of a run, as its user waits for it: from the start of its process, with all that is saved.

Not in it: the launcher's own start, and of each earlier process of the run what it did after its last line of metrics,
its last restart point say, or the step in which it was killed.

clock = WallClock()          # where the models are loaded
line |= clock.take()         # with each line of metrics: what passed since the one before
print("\n".join(time_lines("64 responses", seconds_by_part(read_metrics(path) + [clock.take()]))))
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from training.reporting.metrics_file import read_metrics
from training.runtime.phases import place

# Parts of a run that lie outside of its steps, by the names of their metrics, and how they are called in words.
BEFORE = {"redone": "steps done again", "start": "start-up", "critic_pretrain": "critic's pretraining"}
BETWEEN = {
    "evaluate": "evaluations",
    "checkpoint": "restart points",
    "normalize": "normalisation",
    "save": "saving models",
}
PHASES = {
    "time/critic_pretrain": "pretraining the critic",
    "time/evaluate": "evaluating",
    "time/normalize": "normalising",
    "time/save": "saving models",
}


class WallClock:
    """Seconds of this process by what they went into; what has passed before this is made is its start-up.

    redone: seconds of earlier processes whose lines do not count any more, because their steps are done again.
    """

    def __init__(self, redone: float = 0.0):
        self._first = {"time/start": sum(place.take_seconds().values())}
        if redone:
            self._first["time/redone"] = redone

    def take(self) -> dict[str, float]:
        """What passed since the last call, as metrics: all of it is time/wall."""
        phases, first = place.take_seconds(), self._first
        self._first = {}
        metrics = {"time/wall": sum(phases.values()) + sum(first.values()), **first}
        return metrics | {name: phases[phase] for name, phase in PHASES.items() if phase in phases}


def seconds_after(path: Path, step: int | None) -> float:
    """What the lines of a metrics file beyond this step took; 0 where there is no file, or no step is given."""
    rows = read_metrics(path) if step is not None and path.is_file() else []
    return sum(row.get("time/wall", 0.0) for row in rows if row["step"] > step)


def seconds_by_part(rows: Sequence[Mapping]) -> dict[str, float]:
    """What the lines of a run took, by part, in the order to be shown: they add up to the whole time.

    A step's phases are those of the slowest rank each; where these are together more than the steps took, they are
    shares of that. What is in no part is "other".
    """
    totals = Counter()
    for row in rows:
        totals.update({name.removeprefix("time/"): row[name] for name in row if name.startswith("time/")})
    whole, steps = totals.pop("wall", 0.0), totals.pop("step", 0.0)
    before, between = ({name: totals.pop(name) for name in names if name in totals} for names in (BEFORE, BETWEEN))
    inside = dict(sorted(totals.items())) or ({"train": steps} if steps else {})
    scale = min(1.0, steps / sum(inside.values())) if steps else 1.0
    parts = before | {name: seconds * scale for name, seconds in inside.items()} | between
    other = whole - sum(parts.values())
    if round(other, 1) > 0:  # less is what rounding leaves, and would be shown as 0.0 s
        parts["other"] = other
    return parts


def time_lines(what: str, parts: Mapping[str, float]) -> list[str]:
    """What was done and in which time, and a line for each part with its share."""
    total = sum(parts.values())
    lines = [f"{what}, {timedelta(seconds=round(total))}"]
    for name, seconds in parts.items():
        label = (BEFORE | BETWEEN).get(name, name)
        lines.append(f"  {label:<22}{seconds:>10.1f} s{seconds / total if total else 0.0:>12.1%}")
    return lines
