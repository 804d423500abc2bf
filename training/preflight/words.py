"""Bytes, GPUs, ranks and hosts in words."""

import re
from collections import Counter
from collections.abc import Sequence

from training.preflight.node import Node


def told_bytes(size: float) -> str:
    """Bytes in words, with two digits that matter: "512 GB", "1.5 MB"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}" if size >= 10 * unit else f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"


def told_cards(node: Node) -> str:
    """The GPUs of a node's ranks in words: "8 x NVIDIA A100-SXM4-80GB (8.0)"."""
    kinds = Counter(f"{card.name} ({card.capability})" for card in node.cards)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"


def told_ranks(ranks: Sequence[int]) -> str:
    """Numbers of ranks in words: "rank 3", "ranks 8 to 15", "ranks 1, 5, 7"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    run = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]} to {ranks[-1]}" if run else f"ranks {', '.join(map(str, ranks))}"


def told_hosts(hosts: Sequence[str]) -> str:
    """Names in few words: "gpu[01-03,07] (4 nodes)", "node-a, node-b"."""
    if len(hosts) <= 2:
        return ", ".join(hosts)
    numbers: dict[tuple[str, str, int], list[int]] = {}
    for host in hosts:
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", host)
        key = (match[1], match[3], len(match[2])) if match else (host, "", 0)
        numbers.setdefault(key, []).append(int(match[2]) if match else 0)
    names = [
        f"{start}[{_ranges(sorted(found), width)}]{end}" if len(found) > 1 else _single(start, found[0], width, end)
        for (start, end, width), found in numbers.items()
    ]
    return f"{', '.join(names)} ({len(hosts)} nodes)"


def _single(start: str, number: int, width: int, end: str) -> str:
    return f"{start}{number:0{width}d}{end}" if width else start


def _ranges(numbers: Sequence[int], width: int) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(
        f"{run[0]:0{width}d}-{run[-1]:0{width}d}" if len(run) > 1 else f"{run[0]:0{width}d}" for run in runs
    )
