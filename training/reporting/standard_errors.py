"""Standard errors of metrics on held-out units (prompts, pairs, texts), and of the changes of these metrics.

Units are drawn independently of each other; the tokens of a text are not. A mean over units, or the ratio of two sums
over them (nats over tokens), is linearised in its n units (W. G. Cochran, Sampling Techniques, 3rd ed., section 2.11):

    r   = sum(totals) / sum(counts)                      a mean has counts of 1
    d_i = (totals_i - r * counts_i) / sum(counts)        how far unit i pulls r
    se  = sqrt(n / (n - 1) * sum(d_i^2))                 of a mean that is s / sqrt(n)

Before and after are measured on the same units, so the error of a change uses the differences of d_i in place of d_i.
The difficulty of a unit then cancels as far as it affects both; with two sets of units it would not.

A resumed run may have another reward. Its scores are not compared with those of the earlier reward. A held-out line
with the change of the KL and without that of the score was scored by another reward than the first line. From then on
the earlier measurements that lines are compared with (`with_errors`), and those in checkpoints, have no scores.
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
"""{name: the measurement of each held-out unit, in order}."""


def gathered(size: int, parts: Iterable[tuple[list[int], Mapping[str, Tensor]]]) -> Units:
    """A number for each of `size` examples, by name, in their order and the same on all ranks (all call this).

    parts: for each batch (indices of this rank's examples, {name: (B,) tensor}). The first rows of a tensor belong to
    these examples; the rest pads the batch. Each example is on one rank only. All ranks have at least one batch, with
    the same names.
    """
    own: dict[str, Tensor] = {}
    for indices, values in parts:
        for name, column in values.items():
            table = own.setdefault(name, torch.zeros(size, dtype=torch.float64, device=column.device))
            table[torch.tensor(indices, dtype=torch.long, device=column.device)] = column[: len(indices)].double()
    return {name: distributed.data_parallel_sum(own[name]).tolist() for name in sorted(own)}


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A number measured on n units. pulls: (n,) float64, the d_i of the module's docstring."""

    value: float
    pulls: np.ndarray

    @classmethod
    def of(cls, totals: Sequence[float], counts: Sequence[float] | None = None) -> "Estimate":
        """The estimate sum(totals) / sum(counts); both have one number per unit. Without counts: the mean of totals."""
        y = np.asarray(totals, dtype=np.float64)
        x = np.ones_like(y) if counts is None else np.asarray(counts, dtype=np.float64)
        with np.errstate(invalid="ignore", over="ignore"):  # a total may be infinite or no number
            value = y.sum() / x.sum()
            return cls(float(value), (y - value * x) / x.sum())

    def exp(self) -> "Estimate":
        """The exponential of the estimate; the delta method multiplies the pulls by it. Infinite if it is too large."""
        with np.errstate(over="ignore", invalid="ignore"):
            value = np.exp(self.value)
            return Estimate(float(value), value * self.pulls)

    @property
    def error(self) -> float | None:
        """The standard error; None for a single unit, or if a pull is not finite."""
        return _error(self.pulls)

    def change_error(self, before: "Estimate") -> float | None:
        """The standard error of the change since `before`, which was measured on the same units."""
        return _error(self.pulls - before.pulls)


def _error(pulls: np.ndarray) -> float | None:
    n = len(pulls)
    return math.sqrt(n / (n - 1) * (pulls**2).sum()) if n > 1 and np.isfinite(pulls).all() else None


def with_errors(after: Mapping[str, Estimate], before: Mapping[str, Estimate] | None = None) -> dict[str, float]:
    """{NAME: value, NAME_se: standard error} of each estimate; for those that `before` has, also NAME_change and
    NAME_change_se."""
    metrics: dict[str, float | None] = {}
    for name, now in after.items():
        metrics |= {name: now.value, f"{name}_se": now.error}
        if before is not None and name in before:
            then = before[name]
            metrics |= {f"{name}_change": now.value - then.value, f"{name}_change_se": now.change_error(then)}
    return {name: value for name, value in metrics.items() if value is not None}


def within_noise(change: float, error: float) -> bool:
    """Whether a change is within NOISE standard errors, and so may be chance."""
    return abs(change) <= NOISE * error


def with_error(value: float, error: float | None, sign: str = "") -> str:
    """The text "1.250 ± 0.110", or the value alone; from a thousand on "1250.0 ± 110.0". sign: "+" also marks positive
    values."""
    digits = 3 if max(abs(value), error or 0.0) < 1000 else 1
    value = round(value, digits) + 0.0  # no -0.000
    return f"{value:{sign}.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def value_text(metrics: Mapping[str, float], name: str) -> str:
    """12.34 ± 0.21: a metric with its error, if it has one."""
    error = metrics.get(f"{name}_se")
    return f"{metrics[name]:.4g}" + ("" if error is None else f" ± {error:.2g}")


def change_text(metrics: Mapping[str, float], name: str) -> str:
    """A text with the change of a metric since before the first step, and whether it is noise; "" if not known."""
    change, error = metrics.get(f"{name}_change"), metrics.get(f"{name}_change_se")
    if change is None or error is None:
        return ""
    if change == error == 0:
        return " (unchanged)"
    noise = f", within noise ({NOISE:g} standard errors)" if within_noise(change, error) else ""
    return f" (changed by {change:+.3g} ± {error:.2g}{noise})"


def chance_text(metrics: Mapping[str, float], name: str, chance: float) -> str:
    """A remark that a share is no better than `chance`, unless it is above chance by more than noise; else ""."""
    if metrics[name] - chance > NOISE * metrics.get(f"{name}_se", 0.0):
        return ""
    return f"; no better than chance ({chance:g})"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """All metrics in one line, each with its standard error, without changes."""
    names = [name for name in metrics if not name.endswith(ENDINGS)]
    return ", ".join(f"{name} {value_text(metrics, name)}" for name in names)


OF_RESPONSES = ("kl", "response_length", "new_words")
"""Measurements of held-out responses that do not depend on the reward."""
OTHERS = {"score", *OF_RESPONSES}  # measurements that are no parts of the score


def without_scores(before: Units | None) -> Units | None:
    """What was measured before the first step, without the score and its parts."""
    return before and {name: values for name, values in before.items() if name in OF_RESPONSES}


def paired(before: Units | None, parts: Collection[str]) -> Units | None:
    """`before`, without scores if these had other parts than `parts`: then another reward made them."""
    same = before is None or set(before) - OTHERS == set(parts)
    return before if same else without_scores(before)


def scored_otherwise(row: Mapping) -> bool:
    """Whether a line of metrics was scored by another reward than the held-out prompts before the first step."""
    return "eval/score" in row and "eval/kl_change" in row and "eval/score_change" not in row


def comparable_scores(rows: Sequence[Mapping]) -> list[Mapping]:
    """The lines with held-out scores since the last change of the reward."""
    scored = [row for row in rows if "eval/score" in row]
    return [row for row in scored if scored_otherwise(row) == scored_otherwise(scored[-1])]


def of_one_reward(rows: Sequence[Mapping]) -> list[Mapping]:
    """The lines of a run; lines before the last change of the reward are without their training scores."""
    changes = [place for place, row in enumerate(rows) if "objective/reward_changed" in row]
    before = changes[-1] if changes else 0
    kept = [{name: value for name, value in row.items() if name != "objective/scores"} for row in rows[:before]]
    return [*kept, *rows[before:]]
