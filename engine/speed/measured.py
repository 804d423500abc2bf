"""Ranks whose exchanges have been timed: seconds by bytes, in place of data sheets."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from engine.memory.data_sheets import DataSheet, Link

Curve = Sequence[tuple[float, float]]
"""(bytes, seconds) of a collective call, by rising bytes."""
UNTIMED = DataSheet(flops=float("inf"), bandwidth=float("inf"), link=Link(float("inf"), 0.0))
"""Of ranks whose arithmetic is measured apart."""


@dataclass(frozen=True, slots=True)
class MeasuredRanks:
    """How long these ranks take to gather, and to reduce, so many bytes: between measured sizes as a straight line, and
    beyond the largest as the last piece goes on."""

    world: int
    gathers: Curve
    reductions: Curve
    sheet: DataSheet = UNTIMED

    def all_gather(self, size: float, ranks: int | None = None) -> float:
        """Seconds until all ranks have `size` bytes, of which each had an equal part; of one rank none."""
        return 0.0 if ranks == 1 else read(self.gathers, size)

    def all_reduce(self, size: float, ranks: int | None = None) -> float:
        """Seconds until each of the ranks has the sum of all tensors of `size` bytes; of one rank none."""
        return 0.0 if ranks == 1 else read(self.reductions, size)

    def reduce_scatter(self, size: float) -> float:
        """Seconds of what takes its place with gloo, a sum that all ranks have."""
        return self.all_reduce(size)


def read(curve: Curve, size: float) -> float:
    """The seconds that the curve has for a size; never fewer than those of its smallest one."""
    sizes = [bytes_ for bytes_, _ in curve]
    place = min(max(1, bisect_right(sizes, size)), len(curve) - 1)
    (low, fast), (high, slow) = curve[place - 1], curve[place]
    return max(curve[0][1], fast + (slow - fast) * (size - low) / (high - low))


def tree_crossings(hosts: int, ranks: int) -> float:
    """How many times as many bytes as are gathered go to a host, where ranks gather by broadcasts.

    gloo broadcasts along a binomial tree of the ranks as numbered from the sender, and so crosses between hosts more
    often than it has to (pytorch/gloo, gloo/broadcast.cc). The host that receives most counts.
    """
    world = hosts * ranks
    received = [0] * hosts
    for sender in range(world):
        span = 1
        while span < world:
            for place in range(min(span, world - span)):
                start, end = (place + sender) % world, (place + span + sender) % world
                if start // ranks != end // ranks:
                    received[end // ranks] += 1
            span *= 2
    return max(received) / world


def ring_crossings(hosts: int, ranks: int) -> float:
    """The same of a sum over all ranks: twice around the ring, which enters each host once (gloo/allreduce.cc)."""
    world = hosts * ranks
    return 2 * (world - 1) / world if hosts > 1 else 0.0
