"""Standard errors of metrics on held-out units (prompts, pairs, texts), and of the changes of these metrics.

The units are independent of each other, while the tokens of one text are not. Therefore errors are computed over units.
A metric is a mean over the n units, or a ratio of two sums over them (nats over tokens). It is linearised in the units
(W. G. Cochran, Sampling Techniques, 3rd ed., section 2.11):

    r   = sum(totals) / sum(counts)                      for a mean, all counts are 1
    d_i = (totals_i - r * counts_i) / sum(counts)        how far unit i pulls r
    se  = sqrt(n / (n - 1) * sum(d_i^2))                 for a mean, this is s / sqrt(n)

A change is measured on the same units before and after. Its standard error uses the difference of d_i after and before
in place of d_i. The difficulty of a unit cancels in this difference; with two different sets of units it would not.

A run may be resumed with another reward. Its scores are then not compared with those of the earlier reward, and a line
of held-out metrics has the change of the KL but not the change of the score. From this line on, the stored measurements
before the first step (`with_errors`, checkpoints) have no scores.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine import distributed

NOISE = 2.0
"""A change of up to so many standard errors counts as noise: 95 of 100 changes by chance alone are smaller."""

ENDINGS = ("_se", "_change", "_change_se")
"""The endings that `with_errors` appends to a metric's name."""

Units = Mapping[str, Sequence[float]]
"""{name: a number for each held-out unit, in the order of the units}."""


def gathered(size: int, parts: Iterable[tuple[list[int], Mapping[str, Tensor]]]) -> Units:
    """Gather what the ranks have measured: {name: a number for each of `size` examples, in their order}, the same on
    all ranks (all ranks call this).

    parts: for each batch of this rank (indices of its examples, {name: (B,) tensor}). The first rows of a tensor belong
    to these examples; further rows are padding. Each example is on one rank only. All ranks have at least one batch,
    with the same names.
    """
    own: dict[str, Tensor] = {}
    for indices, values in parts:
        for name, column in values.items():
            table = own.setdefault(name, torch.zeros(size, dtype=torch.float64, device=column.device))
            table[torch.tensor(indices, dtype=torch.long, device=column.device)] = column[: len(indices)].double()
    return {name: distributed.data_parallel_sum(own[name]).tolist() for name in sorted(own)}


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A metric measured on n units. value: the metric. pulls: (n,) float64, the d_i of the module's docstring."""

    value: float
    pulls: np.ndarray

    @classmethod
    def of(cls, totals: Sequence[float], counts: Sequence[float] | None = None) -> "Estimate":
        """The estimate sum(totals) / sum(counts), or, without counts, the mean of totals. totals, counts: a number for
        each unit."""
        y = np.asarray(totals, dtype=np.float64)
        x = np.ones_like(y) if counts is None else np.asarray(counts, dtype=np.float64)
        with np.errstate(invalid="ignore", over="ignore"):  # a total may be infinite or NaN
            value = y.sum() / x.sum()
            return cls(float(value), (y - value * x) / x.sum())

    def exp(self) -> "Estimate":
        """The exponential of the estimate, infinite if it is too large for a float. By the delta method the pulls are
        multiplied by the exponential."""
        with np.errstate(over="ignore", invalid="ignore"):
            value = np.exp(self.value)
            return Estimate(float(value), value * self.pulls)

    @property
    def error(self) -> float | None:
        """The standard error; None if there is a single unit, or if a pull is not finite."""
        return _error(self.pulls)

    def change_error(self, before: "Estimate") -> float | None:
        """The standard error of the change since `before`, which was measured on the same units."""
        return _error(self.pulls - before.pulls)


def _error(pulls: np.ndarray) -> float | None:
    n = len(pulls)
    return math.sqrt(n / (n - 1) * (pulls**2).sum()) if n > 1 and np.isfinite(pulls).all() else None


def with_errors(after: Mapping[str, Estimate], before: Mapping[str, Estimate] | None = None) -> dict[str, float]:
    """{NAME: value, NAME_se: its standard error} of each estimate. If `before` has an estimate of this name, also
    NAME_change and NAME_change_se: the change since then, and the standard error of this change."""
    metrics: dict[str, float | None] = {}
    for name, now in after.items():
        metrics |= {name: now.value, f"{name}_se": now.error}
        if before is not None and name in before:
            then = before[name]
            metrics |= {f"{name}_change": now.value - then.value, f"{name}_change_se": now.change_error(then)}
    return {name: value for name, value in metrics.items() if value is not None}


def within_noise(change: float, error: float | None) -> bool:
    """Whether a change is no larger than NOISE standard errors, and may be chance. error: None counts as 0."""
    return abs(change) <= NOISE * (error or 0.0)


def with_error(value: float, error: float | None, sign: str = "") -> str:
    """A text such as "1.250 ± 0.110"; the value alone if there is no error. Numbers from a thousand on have one
    decimal: "1250.0 ± 110.0". sign: "+" to write the sign of positive values too."""
    digits = 3 if max(abs(value), error or 0.0) < 1000 else 1
    value = round(value, digits) + 0.0  # no -0.000
    return f"{value:{sign}.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def cell(metrics: Mapping[str, float], name: str, sign: str = "") -> str:
    """`with_error` of a metric; "" if it was not measured."""
    return with_error(metrics[name], metrics.get(f"{name}_se"), sign) if name in metrics else ""


def change_cell(first: Mapping[str, float], last: Mapping[str, float], name: str) -> str:
    """`with_error` of a metric's change since before the first step; "" if it is not known. first, last: as from
    `evaluations`. If the run was resumed in another folder, the first one is not in this folder's metrics."""
    if f"{name}_change" in last or name not in first or name not in last:
        return cell(last, f"{name}_change", "+")
    return with_error(last[name] - first[name], None, "+")


def noisy(metrics: Mapping[str, float], name: str) -> bool:
    """Whether the metric's change since before the first step, and its standard error, are known, and it is noise."""
    change, error = f"{name}_change", f"{name}_change_se"
    return {change, error} <= metrics.keys() and within_noise(metrics[change], metrics[error])


def value_text(metrics: Mapping[str, float], name: str) -> str:
    """A text with a metric and its standard error, such as "12.34 ± 0.21"; the metric alone if it has no error."""
    error = metrics.get(f"{name}_se")
    return f"{metrics[name]:.4g}" + ("" if error is None else f" ± {error:.2g}")


def change_text(metrics: Mapping[str, float], name: str) -> str:
    """A text with the change of a metric since before the first step, and whether the change is noise; "" if the change
    is not known."""
    change, error = metrics.get(f"{name}_change"), metrics.get(f"{name}_change_se")
    if change is None or error is None:
        return ""
    if change == error == 0:
        return " (unchanged)"
    noise = f", within noise ({NOISE:g} standard errors)" if within_noise(change, error) else ""
    return f" (changed by {change:+.3g} ± {error:.2g}{noise})"


def chance_text(metrics: Mapping[str, float], name: str, chance: float) -> str:
    """A remark that the metric, a share, is no better than `chance`; "" if it is above `chance` by more than noise."""
    if metrics[name] - chance > NOISE * metrics.get(f"{name}_se", 0.0):
        return ""
    return f"; no better than chance ({chance:g})"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """All metrics in one line, each with its standard error, without changes."""
    names = [name for name in metrics if not name.endswith(ENDINGS)]
    return ", ".join(f"{name} {value_text(metrics, name)}" for name in names)


def evaluations(rows: Sequence[Mapping], names: Collection[str]) -> tuple[Mapping, Mapping]:
    """(the line of metrics with the evaluation before the first step, that with the latest one after it), {} for an
    evaluation that does not exist. names: metrics of which an evaluation has one."""
    measured = [row for row in rows if not row.keys().isdisjoint(names)]
    first = next((row for row in measured if row["step"] == 0), {})
    return first, next((row for row in reversed(measured) if row["step"] > 0), {})


OF_RESPONSES = ("kl", "response_length", "new_words", "likelihood")
"""Measurements of held-out responses that do not depend on the reward."""
OTHERS = {"score", *OF_RESPONSES}  # measurements that are not parts of the score


def without_scores(before: Units | None) -> Units | None:
    """`before`, the measurements before the first step, without the score and its parts."""
    return before and {name: values for name, values in before.items() if name in OF_RESPONSES}


def paired(before: Units | None, parts: Collection[str]) -> Units | None:
    """`before`, the measurements before the first step. Its scores are removed if they have other parts than `parts`,
    because they came from another reward."""
    same = before is None or set(before) - OTHERS == set(parts)
    return before if same else without_scores(before)


def scored_otherwise(row: Mapping) -> bool:
    """Whether the scores of this line of metrics came from another reward than those before the first step."""
    return "eval/score" in row and "eval/kl_change" in row and "eval/score_change" not in row


def comparable_scores(rows: Sequence[Mapping]) -> list[Mapping]:
    """The lines with held-out scores since the last change of the reward."""
    scored = [row for row in rows if "eval/score" in row]
    return [row for row in scored if scored_otherwise(row) == scored_otherwise(scored[-1])]


def of_one_reward(rows: Sequence[Mapping]) -> list[Mapping]:
    """The lines of a run. Lines before the last change of the reward are returned without their training scores."""
    changes = [place for place, row in enumerate(rows) if "objective/reward_changed" in row]
    before = changes[-1] if changes else 0
    kept = [{name: value for name, value in row.items() if name != "objective/scores"} for row in rows[:before]]
    return [*kept, *rows[before:]]
