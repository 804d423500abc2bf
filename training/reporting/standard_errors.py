"""Standard errors of what is measured on held-out units (prompts, pairs, texts), and of how it changed.

Units are drawn independently of each other; the tokens of a text are not. A mean over units, or the ratio of two sums
over them (nats over tokens), is linearised in its n units (W. G. Cochran, Sampling Techniques, 3rd ed., section 2.11):

    r   = sum(totals) / sum(counts)                      a mean has counts of 1
    d_i = (totals_i - r * counts_i) / sum(counts)        how far unit i pulls r
    se  = sqrt(n / (n - 1) * sum(d_i^2))                 of a mean that is s / sqrt(n)

Before and after are measured on the same units: the change's error has the differences of d_i in place of d_i. What
makes a unit easy or hard then cancels as far as it is in both, which it would not with two sets of units.

A reward that is another since a run went on: its scores do not stand beside those of before.

A held-out line that has the KL's change and not the score's was scored by another reward than the first one was: what
is paired with lines from then on (`standard_errors.with_errors`), and stands in checkpoints, has no scores.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine import distributed

NOISE = 2.0
"""Standard errors up to which a change counts as noise: 95 of 100 changes by chance alone stay below."""

ENDINGS = ("_se", "_change", "_change_se")
"""What `with_errors` puts behind a metric's name."""

Units = Mapping[str, Sequence[float]]
"""What was measured of each held-out unit, in their order, by name."""


def gathered(size: int, parts: Iterable[tuple[list[int], Mapping[str, Tensor]]]) -> Units:
    """A number for each of `size` examples, by name, in their order and the same on all ranks (all call this).

    parts: batch by batch the indices of this rank's examples, each on one rank only, and by name (B,) tensors whose
    first rows are theirs; the rest fills up a batch. All ranks have at least one batch, with the same names.
    """
    own: dict[str, Tensor] = {}
    for indices, values in parts:
        for name, column in values.items():
            table = own.setdefault(name, torch.zeros(size, dtype=torch.float64, device=column.device))
            table[torch.tensor(indices, dtype=torch.long, device=column.device)] = column[: len(indices)].double()
    return {name: distributed.all_reduce_sum(own[name]).tolist() for name in sorted(own)}


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A number measured on units. pulls: (n,) float64, d_i above."""

    value: float
    pulls: np.ndarray

    @classmethod
    def of(cls, totals: Sequence[float], counts: Sequence[float] | None = None) -> "Estimate":
        """sum(totals) / sum(counts), a number a unit each; without counts the mean of totals."""
        y = np.asarray(totals, dtype=np.float64)
        x = np.ones_like(y) if counts is None else np.asarray(counts, dtype=np.float64)
        with np.errstate(invalid="ignore", over="ignore"):  # a total may be infinite or no number
            value = y.sum() / x.sum()
            return cls(float(value), (y - value * x) / x.sum())

    def exp(self) -> "Estimate":
        """e to it, by the delta method: the derivative, e to it, times the pulls. Infinite where that is too large."""
        with np.errstate(over="ignore", invalid="ignore"):
            value = np.exp(self.value)
            return Estimate(float(value), value * self.pulls)

    @property
    def error(self) -> float | None:
        """The standard error; None for one unit, which does not tell, and where a pull is not finite."""
        return _error(self.pulls)

    def change_error(self, before: "Estimate") -> float | None:
        """That of the change since `before`, which was measured on the same units."""
        return _error(self.pulls - before.pulls)


def _error(pulls: np.ndarray) -> float | None:
    n = len(pulls)
    return math.sqrt(n / (n - 1) * (pulls**2).sum()) if n > 1 and np.isfinite(pulls).all() else None


def with_errors(after: Mapping[str, Estimate], before: Mapping[str, Estimate] | None = None) -> dict[str, float]:
    """Metrics: each value by its name, NAME_se; and where `before` has it NAME_change and NAME_change_se."""
    metrics: dict[str, float | None] = {}
    for name, now in after.items():
        metrics |= {name: now.value, f"{name}_se": now.error}
        if before is not None and name in before:
            then = before[name]
            metrics |= {f"{name}_change": now.value - then.value, f"{name}_change_se": now.change_error(then)}
    return {name: value for name, value in metrics.items() if value is not None}


def within_noise(change: float, error: float) -> bool:
    """Whether a change is too small to be told from chance."""
    return abs(change) <= NOISE * error


def with_error(value: float, error: float | None, sign: str = "") -> str:
    """1.250 ± 0.110, or the value alone; from a thousand on 1250.0 ± 110.0. sign: "+" for one that is shown where it is
    positive, too."""
    digits = 3 if max(abs(value), error or 0.0) < 1000 else 1
    value = round(value, digits) + 0.0  # no -0.000
    return f"{value:{sign}.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def value_text(metrics: Mapping[str, float], name: str) -> str:
    """12.34 ± 0.21: a metric with its error, if it has one."""
    error = metrics.get(f"{name}_se")
    return f"{metrics[name]:.4g}" + ("" if error is None else f" ± {error:.2g}")


def change_text(metrics: Mapping[str, float], name: str) -> str:
    """How it has changed since before the first step, and whether that is noise; nothing where that is not known."""
    change, error = metrics.get(f"{name}_change"), metrics.get(f"{name}_change_se")
    if change is None or error is None:
        return ""
    if change == error == 0:
        return " (unchanged)"
    noise = f", within noise ({NOISE:g} standard errors)" if within_noise(change, error) else ""
    return f" (changed by {change:+.3g} ± {error:.2g}{noise})"


def chance_text(metrics: Mapping[str, float], name: str, chance: float) -> str:
    """That a share is no better than `chance`, where it is not above it by more than noise; else nothing."""
    if metrics[name] - chance > NOISE * metrics.get(f"{name}_se", 0.0):
        return ""
    return f"; no better than chance ({chance:g})"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """All of them on a line, each with its error and without its change."""
    names = [name for name in metrics if not name.endswith(ENDINGS)]
    return ", ".join(f"{name} {value_text(metrics, name)}" for name in names)


OF_RESPONSES = ("kl", "response_length", "new_words")
"""What is measured of held-out responses whatever scores them."""
OTHERS = {"score", *OF_RESPONSES}  # than the score's parts


def without_scores(before: Units | None) -> Units | None:
    """What was measured before the first step, without the score and its parts."""
    return before and {name: values for name, values in before.items() if name in OF_RESPONSES}


def paired(before: Units | None, parts: Collection[str]) -> Units | None:
    """`before`, without scores if these were made of other parts: a part's name is the reward's own."""
    same = before is None or set(before) - OTHERS == set(parts)
    return before if same else without_scores(before)


def scored_otherwise(row: Mapping) -> bool:
    """Whether a line of metrics was scored by another reward than the held-out prompts before the first step."""
    return "eval/score" in row and "eval/kl_change" in row and "eval/score_change" not in row


def comparable_scores(rows: Sequence[Mapping]) -> list[Mapping]:
    """The lines with held-out scores, from the last change of the reward on that they tell of."""
    scored = [row for row in rows if "eval/score" in row]
    return [row for row in scored if scored_otherwise(row) == scored_otherwise(scored[-1])]


def of_one_reward(rows: Sequence[Mapping]) -> list[Mapping]:
    """The lines of a run, those before the last change of its reward without the scores in training."""
    changes = [place for place, row in enumerate(rows) if "objective/reward_changed" in row]
    before = changes[-1] if changes else 0
    kept = [{name: value for name, value in row.items() if name != "objective/scores"} for row in rows[:before]]
    return [*kept, *rows[before:]]
