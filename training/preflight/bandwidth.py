"""How fast ranks exchange numbers: all-reduce and all-gather, timed within each node and between all ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine import by_node, distributed
from engine.distributed import RankGroup
from engine.zero.accelerator import on_gpu, ranks_of_this_machine

ALL_GATHER, ALL_REDUCE = "all-gather", "all-reduce"
SIZES_GPU = (1 << 10, 1 << 20, 1 << 25, 1 << 28)  # bytes
SIZES_CPU = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
A_SIZE = 0.4  # seconds for one size of one kind
MOST = 20  # calls
ENOUGH = 2.0  # seconds of one call, after which no larger size is tried

Call = Callable[[torch.Tensor, torch.Tensor], object]  # of a tensor of all ranks' numbers, and this one's part


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of calls between so many ranks. seconds: of a call, by the bytes that each rank has at its end."""

    kind: str
    ranks: int
    seconds: dict[int, float]

    @property
    def bandwidth(self) -> float:
        """Bytes a second through each rank's link with the largest size: of a ring (n - 1) / n of the bytes go through,
        of a sum twice (NVIDIA/nccl-tests, doc/PERFORMANCE.md, 03a204a1f38aaea17f1a777885bb2d9600ba7eff)."""
        size = max(self.seconds)
        rounds = 2 if self.kind == ALL_REDUCE else 1
        return rounds * (self.ranks - 1) / self.ranks * size / self.seconds[size]


def measure() -> tuple[list[Measured], list[list[Measured]]]:
    """(between all ranks, within each node in the order of nodes); nothing within nodes that have one rank, or not all
    the same number (all ranks call this)."""
    world, local = distributed.world_size(), ranks_of_this_machine()
    within: list[list[Measured]] = []
    even = len(set(distributed.all_gather_objects(local))) == 1
    if even and 1 < local < world:
        group = RankGroup(local)
        own = [
            timed(ALL_REDUCE, group, lambda whole, _: group.sum_(whole)),
            timed(ALL_GATHER, group, group.gather_into),
        ]
        within = distributed.all_gather_objects(own)[::local]
    everyone = RankGroup(world)
    everywhere = [
        timed(ALL_REDUCE, everyone, lambda whole, _: everyone.sum_(whole)),
        timed(ALL_GATHER, everyone, by_node.gathers().gather_into),
    ]
    return everywhere, within


def timed(kind: str, group: RankGroup, call: Call) -> Measured:
    """How long a call takes, by the rank of the group that takes longest (all ranks of the group call this)."""
    seconds: dict[int, float] = {}
    for size in SIZES_GPU if on_gpu() else SIZES_CPU:
        own = torch.zeros(max(1, size // 4 // group.size), device=distributed.device())
        whole = own.new_zeros(len(own) * group.size)
        for _ in range(2):  # the first call makes connections
            once = _slowest(group, call, whole, own, 1)
        seconds[size] = _slowest(group, call, whole, own, max(1, min(MOST, int(A_SIZE / once))))
        if once > ENOUGH:
            break
    return Measured(kind, group.size, seconds)


def _slowest(group: RankGroup, call: Call, whole: torch.Tensor, own: torch.Tensor, times: int) -> float:
    """Seconds of a call, of the rank that took longest."""
    _finish()
    group.all_objects(None)  # all are here
    began = time.perf_counter()
    for _ in range(times):
        call(whole, own)
    _finish()
    return max(1e-9, *group.all_objects((time.perf_counter() - began) / times))


def _finish() -> None:
    if on_gpu():
        torch.cuda.synchronize()
