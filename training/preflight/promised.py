"""Measured bandwidth beside what the hardware should give, where that is known, and beside that of other nodes."""

from collections.abc import Sequence

from engine.memory.data_sheets import Link, data_sheet
from engine.speed.machines import Machines
from training.preflight.bandwidth import ALL_REDUCE, Measured
from training.preflight.node import GB, Node

NETWORK = 4e-6  # seconds of a step between nodes, as of ETHERNET_100G
SLOW = 0.5  # of what the hardware should give


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
