"""Measured bandwidth in words, and beside that of other nodes."""

from collections.abc import Sequence

from training.preflight.bandwidth import Measured
from training.preflight.node import GB, Node


def lines(nodes: Sequence[Node], everywhere: Sequence[Measured], within: Sequence[Sequence[Measured]]) -> list[str]:
    """What was measured."""
    said = [f"  within {nodes[number].host}: {_told(one)}" for number, kinds in enumerate(within) for one in kinds]
    name = f"between {len(nodes)} nodes" if len(nodes) > 1 else f"within {nodes[0].host}"
    said += [f"  {name}, {one.ranks} ranks: {_told(one)}" for one in everywhere]
    return ["bandwidth (of each rank's link):", *said]


def _told(one: Measured) -> str:
    times = ", ".join(f"{_told_size(size)} {1e3 * seconds:.3g} ms" for size, seconds in one.seconds.items())
    return f"{one.kind} {one.bandwidth / GB:.3g} GB/s ({times})"


def _told_size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def slower(nodes: Sequence[Node], within: Sequence[Sequence[Measured]]) -> list[str]:
    """Names of nodes within which ranks exchange at less than half of what they do in the others."""
    if len(within) < 2:
        return []
    speeds = [min(one.bandwidth for one in kinds) for kinds in within]
    typical = sorted(speeds)[len(speeds) // 2]
    return [nodes[number].host for number, speed in enumerate(speeds) if speed < typical / 2]
