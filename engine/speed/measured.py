"""Ranks whose exchanges have been timed: seconds by bytes, in place of data sheets."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from engine.memory.data_sheets import DataSheet, Link
from engine.speed.rates import Rates

Curve = Sequence[tuple[float, float]]
"""(bytes, seconds) of a collective call, by rising bytes."""
UNTIMED = DataSheet(flops=float("inf"), bandwidth=float("inf"), link=Link(float("inf"), 0.0))
"""Of ranks whose arithmetic is measured apart, or is not asked for."""
NO_ARITHMETIC = Rates(sheet=UNTIMED, layer_start=0.0, token_start=0.0, adam=float("inf"), overlaps=False)
"""By which a step takes what ranks exchange, and nothing else."""


@dataclass(frozen=True, slots=True)
class MeasuredRanks:
    """How long these ranks take to gather, and to reduce, so many bytes: between measured sizes as a straight line, and
    beyond the largest as the last piece goes on.

    scatters: of sums of which each rank gets its part; None where all ranks get them whole, as with gloo. within: those
    of a node, among whom calls of no more ranks go.
    """

    world: int
    gathers: Curve
    reductions: Curve
    scatters: Curve | None = None
    within: "MeasuredRanks | None" = None
    sheet: DataSheet = UNTIMED

    def all_gather(self, size: float, ranks: int | None = None) -> float:
        """Seconds until all ranks have `size` bytes, of which each had an equal part; of one rank none."""
        return 0.0 if ranks == 1 else read(self._among(ranks).gathers, size)

    def all_reduce(self, size: float, ranks: int | None = None) -> float:
        """Seconds until each of the ranks has the sum of all tensors of `size` bytes; of one rank none."""
        return 0.0 if ranks == 1 else read(self._among(ranks).reductions, size)

    def reduce_scatter(self, size: float) -> float:
        """Seconds until each rank has its part of the sum of all tensors of `size` bytes."""
        return read(self.reductions if self.scatters is None else self.scatters, size)

    def _among(self, ranks: int | None) -> "MeasuredRanks":
        inner = self.within
        return self if inner is None or ranks is None or ranks > inner.world else inner


def read(curve: Curve, size: float) -> float:
    """The seconds that the curve has for a size; never fewer than those of its smallest one."""
    sizes = [bytes_ for bytes_, _ in curve]
    place = min(max(1, bisect_right(sizes, size)), len(curve) - 1)
    (low, fast), (high, slow) = curve[place - 1], curve[place]
    return max(curve[0][1], fast + (slow - fast) * (size - low) / (high - low))
