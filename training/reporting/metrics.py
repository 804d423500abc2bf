"""Computes a step's metrics: each rank adds up sums and counts, which are reduced once over all ranks.

    metrics = Accumulator()                                      # one for each step of training
    metrics.add("policy/loss", loss_sum, tokens)                 # any number of times: once a micro-batch
    metrics.add_max("policy/ratio_max", ratio.max())
    metrics.add_moments(advantages, mask, mean="advantages/mean", std="advantages/std")
    writer.log(step, samples, metrics.reduce())                  # on every rank: reduce() is a collective call

Until `reduce`, a metric is kept as numbers that can be summed over micro-batches and ranks, such as a sum and a count.
Means, variances and ratios are computed only from the complete sums. A mean of the ranks' means would give a rank with
3 tokens the same weight as a rank with 3000.
"""

import math

import torch

from engine import distributed
from engine.algo.masked import moments

Number = float | torch.Tensor

EXTREMES = {"max": 1.0, "min": -1.0}
"""{kind of metric: the sign with which its values are kept}. Both kinds keep the largest signed value."""
ROUNDING = 1e-12
"""A variance below this share of the mean square counts as 0: it is the rounding error of float64 for equal values."""


class Accumulator:
    """Collects the metrics of one step on this rank. Adding a number never waits for the GPU: tensors stay tensors
    until `reduce`."""

    def __init__(self):
        self._kinds: dict[str, str] = {}
        self._parts: dict[str, list[Number]] = {}

    def add(self, name: str, total: Number, count: Number) -> None:
        """Add to a metric that reduces to the mean of all items (tokens, samples). total: the sum of the items added
        now. count: their number."""
        self._add(name, "mean", [total, count])

    def add_sum(self, name: str, total: Number) -> None:
        """Add to a metric that reduces to the plain sum over all calls and ranks, such as a number of events."""
        self._add(name, "sum", [total])

    def add_max(self, name: str, value: Number) -> None:
        """Add to a metric that reduces to the largest value. NaN becomes infinity, since a reduction may lose NaN."""
        self._add_extreme(name, "max", torch.as_tensor(_scalar(value), dtype=torch.float64))

    def add_min(self, name: str, value: Number) -> None:
        """Add to a metric that reduces to the smallest value. NaN becomes minus infinity."""
        self._add_extreme(name, "min", -torch.as_tensor(_scalar(value), dtype=torch.float64))

    def add_moments(
        self,
        values: torch.Tensor,
        mask: torch.Tensor,
        *,
        mean: str | None = None,
        std: str | None = None,
        variance: str | None = None,
    ) -> None:
        """Add those `values` where `mask` is true (same shape). mean, std, variance: the names of the metrics that
        reduce to their mean, standard deviation and variance; None for no such metric.

        Variance and standard deviation are those of the population: the sum of squares is divided by the count.
        """
        total, squares, count = _moments(values, mask)
        if mean is not None:
            self.add(mean, total, count)
        if std is not None:
            self._add(std, "std", [total, squares, count])
        if variance is not None:
            self._add(variance, "variance", [total, squares, count])

    def add_explained_variance(
        self, name: str, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """Add to a metric that reduces to 1 - Var(returns - values) / Var(returns), over the positions where `mask` is
        true.

        1 means a perfect critic; 0 means a critic no better than a constant; below 0 it is worse than a constant. If
        the returns do not vary, `reduce` gives no entry.
        """
        error_total, error_squares, count = _moments(returns - values, mask)
        total, squares, _ = _moments(returns, mask)
        self._add(name, "explained_variance", [error_total, error_squares, total, squares, count])

    def add_slope(self, name: str, values: torch.Tensor, outcomes: torch.Tensor, mask: torch.Tensor) -> None:
        """Add to a metric that reduces to the slope of the line fitted to the points (value, outcome) by least squares,
        over the positions where `mask` is true.

        1: the values are right, or off by a constant. Below 1: high values are too high and low values too low. Above
        1: the values are too near to each other. If the values do not vary, `reduce` gives no entry.
        """
        total, squares, count = _moments(values, mask)
        other, _, _ = _moments(outcomes, mask)
        both, _, _ = _moments(values.double() * outcomes.double(), mask)
        self._add(name, "slope", [total, squares, other, both, count])

    def reduce(self) -> dict[str, float]:
        """{name: value} of all metrics, reduced over all ranks; the result is the same on all ranks. A metric without
        items gives no entry.

        This is a collective call: every rank makes it, also a rank that added nothing. The sums are not reset; use a
        new Accumulator for the next step. Ranks may have different metrics, for example if a rank had no valid sample.
        Therefore the ranks first gather the names of all metrics: a small message in each step is better than a long
        run that stops because of a metric. Then one all-reduce sums all sums and counts, and another one takes the
        maximum of all extremes.
        """
        layout = _union(
            distributed.all_gather_objects(
                {name: (self._kinds[name], len(parts)) for name, parts in self._parts.items()}
            )
        )
        extremes = sorted(name for name, (kind, _) in layout.items() if kind in EXTREMES)
        summed = sorted(layout.keys() - set(extremes))
        reduced = {}
        if summed:
            numbers = iter(distributed.data_parallel_sum(self._flat(summed, layout, missing=0.0)).tolist())
            for name in summed:
                kind, width = layout[name]
                reduced[name] = FINISH[kind](*(next(numbers) for _ in range(width)))
        if extremes:
            numbers = distributed.all_reduce_max(self._flat(extremes, layout, missing=-math.inf)).tolist()
            reduced.update({name: EXTREMES[layout[name][0]] * number for name, number in zip(extremes, numbers)})
        return {name: reduced[name] for name in sorted(reduced) if reduced[name] is not None}

    def _add_extreme(self, name: str, kind: str, value: torch.Tensor) -> None:
        """Keep the largest `value`. For a minimum, the caller negates the value."""
        value = torch.where(value.isnan(), math.inf, value)
        self._declare(name, kind)
        self._parts[name] = [torch.maximum(self._parts[name][0], value) if name in self._parts else value]

    def _add(self, name: str, kind: str, parts: list[Number]) -> None:
        self._declare(name, kind)
        parts = [_scalar(part) for part in parts]
        self._parts[name] = [a + b for a, b in zip(self._parts[name], parts)] if name in self._parts else parts

    def _declare(self, name: str, kind: str) -> None:
        known = self._kinds.setdefault(name, kind)
        assert known == kind, f"metric {name} was added as {known} and now as {kind}"

    def _flat(self, names: list[str], layout: dict[str, tuple[str, int]], missing: float) -> torch.Tensor:
        """This rank's numbers of the metrics `names` in one float64 tensor. missing: stands for the numbers of a metric
        to which this rank added nothing."""
        device = distributed.device()
        parts = [part for name in names for part in self._parts.get(name, [missing] * layout[name][1])]
        return torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device) for part in parts])


def _scalar(value: Number) -> Number:
    """`value` as a float or as a detached 0-d float64 tensor. In float32 the sums of a whole step would lose digits."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    assert value.dim() == 0, f"a metric takes single numbers, not a tensor of shape {tuple(value.shape)}"
    return value.detach().double()


def _moments(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum, sum of squares, count) of the values where `mask` is true. Other values have no influence, not even NaN."""
    assert values.shape == mask.shape, f"values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape"
    count, total, squares = moments(values.detach(), mask.bool())
    return total, squares, count


def _union(layouts: list[dict[str, tuple[str, int]]]) -> dict[str, tuple[str, int]]:
    """{name: (kind, how many numbers are kept)} of all metrics that any rank has."""
    union: dict[str, tuple[str, int]] = {}
    for rank, layout in enumerate(layouts):
        for name, entry in layout.items():
            known = union.setdefault(name, entry)
            assert known == entry, f"metric {name} is a {entry[0]} on rank {rank} and a {known[0]} on a rank before it"
    return union


def _mean(total: float, count: float) -> float | None:
    return total / count if count != 0 else None


def _variance(total: float, squares: float, count: float) -> float | None:
    if count == 0:
        return None
    mean_square = squares / count
    variance = mean_square - (total / count) ** 2
    return 0.0 if variance < ROUNDING * mean_square else variance


def _std(total: float, squares: float, count: float) -> float | None:
    variance = _variance(total, squares, count)
    return None if variance is None else math.sqrt(variance)


def _explained_variance(
    error_total: float, error_squares: float, total: float, squares: float, count: float
) -> float | None:
    variance = _variance(total, squares, count)
    return 1 - _variance(error_total, error_squares, count) / variance if variance else None


def _slope(total: float, squares: float, other: float, both: float, count: float) -> float | None:
    variance = _variance(total, squares, count)
    return (both / count - total / count * other / count) / variance if variance else None


FINISH = {
    "mean": _mean,
    "sum": float,
    "variance": _variance,
    "std": _std,
    "explained_variance": _explained_variance,
    "slope": _slope,
}
"""{kind of metric: function from its reduced numbers to its value, which is None if there is nothing to report}."""
