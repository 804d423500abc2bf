"""How fast ranks exchange numbers: all-reduce and all-gather, timed within each node and between all ranks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine import by_node, distributed
from engine.distributed import RankGroup
from engine.memory.data_sheets import Link, data_sheet
from engine.speed.machines import Machines
from engine.speed.measured import Curve
from engine.zero.accelerator import on_gpu, ranks_of_this_machine
from training.preflight.node import GB, Node

ALL_GATHER, ALL_REDUCE = "all-gather", "all-reduce"
SIZES_GPU = (1 << 10, 1 << 20, 1 << 25, 1 << 28)  # bytes
SIZES_CPU = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
A_SIZE = 0.4  # seconds for one size of one kind
MOST = 20  # calls
ENOUGH = 2.0  # seconds of one call, after which no larger size is tried
NETWORK = 4e-6  # seconds of a step between nodes, as of ETHERNET_100G
SLOW = 0.5  # of what the hardware should give

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

    @property
    def curve(self) -> Curve:
        """A start, and so much a byte, by the smallest and the largest size: between them a busy link is noise."""
        least, most = min(self.seconds), max(self.seconds)
        first = (least, self.seconds[least]) if least < most else (0, 0.0)
        return [first, (most, max(first[1], self.seconds[most]))]


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


def machines(nodes: Sequence[Node], within: bool) -> Machines | None:
    """The hardware by data sheets and by what nodes tell of their network; None where that is not known.

    within: one node alone.
    """
    sheets = [data_sheet(card.name) for node in nodes for card in node.cards]
    if not sheets or any(sheet is None for sheet in sheets):
        return None
    slowest = min((sheet for sheet in sheets if sheet), key=lambda sheet: sheet.link.bandwidth)
    gpus = len(nodes[0].ranks)
    if within or len(nodes) == 1:
        return Machines(slowest, gpus)
    speed = min(node.network_speed for node in nodes)
    return Machines(slowest, gpus, len(nodes), Link(speed, NETWORK)) if speed else None


def lines(nodes: Sequence[Node], everywhere: Sequence[Measured], within: Sequence[Sequence[Measured]]) -> list[str]:
    """What was measured, beside what the hardware should give where that is known."""
    said = []
    for number, kinds in enumerate(within):
        known = machines(nodes, within=True)
        said += [f"  within {nodes[number].host}: {_told(one, known)}" for one in kinds]
    name = f"between {len(nodes)} nodes" if len(nodes) > 1 else f"within {nodes[0].host}"
    said += [f"  {name}, {one.ranks} ranks: {_told(one, machines(nodes, len(nodes) == 1))}" for one in everywhere]
    return ["bandwidth (of each rank's link):", *said]


def _told(one: Measured, known: Machines | None) -> str:
    size = max(one.seconds)
    times = ", ".join(f"{_told_size(size)} {1e3 * seconds:.3g} ms" for size, seconds in one.seconds.items())
    text = f"{one.kind} {one.bandwidth / GB:.3g} GB/s ({times})"
    if known is None:
        return text
    ideal = (known.all_reduce if one.kind == ALL_REDUCE else known.all_gather)(size, one.ranks)
    share = ideal / one.seconds[size]
    slow = ": SLOW, look at topology (nvidia-smi topo -m), NCCL_DEBUG=INFO and cables" if share < SLOW else ""
    return f"{text}, {share:.0%} of what the hardware should give{slow}"


def _told_size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def slower(nodes: Sequence[Node], within: Sequence[Sequence[Measured]]) -> list[str]:
    """Names of nodes within which ranks exchange at less than half of what they do in the others."""
    if len(within) < 2:
        return []
    speeds = [min(one.bandwidth for one in kinds) for kinds in within]
    typical = sorted(speeds)[len(speeds) // 2]
    return [nodes[number].host for number, speed in enumerate(speeds) if speed < typical / 2]
