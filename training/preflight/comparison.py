"""What is wrong with nodes, or differs between them; no node is asked anything here."""

import enum
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from training.preflight.node import DATA, EXTENSIONS, GB, OUTPUT, Node
from training.preflight.words import told_bytes, told_cards, told_ranks

SAME_VERSIONS = ("python", "torch", "deepspeed", "transformers", "CUDA", "NCCL")
LEAST_SHARED = 1e9  # bytes of /dev/shm, by which ranks of a node with GPUs exchange what does not go over NVLink
LEAST_CACHE = 1e9
TAKEN = 0.9  # of a GPU's memory, of which less is free where something else has some
CLOCKS = 1.0  # seconds that clocks may be apart


class Weight(enum.IntEnum):
    """Whether a run can go on with it."""

    WARNING = 0
    FAULT = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong: on which hosts, in which row of the table, and in a sentence without the hosts' names."""

    hosts: tuple[str, ...]
    row: str
    text: str
    weight: Weight = Weight.FAULT


def findings(nodes: Sequence[Node], room: int = 0) -> list[Finding]:
    """All that is wrong with nodes, faults first. room: bytes that the run writes to its output folder, if known."""
    found = [
        *different_versions(nodes),
        *devices(nodes),
        *cards(nodes),
        *tools(nodes),
        *inputs(nodes),
        *disks(nodes, room),
        *memory(nodes),
        *environment(nodes),
        *clocks(nodes),
    ]
    return sorted(found, key=lambda finding: -finding.weight)


def in_short(nodes: Sequence[Node]) -> list[Finding]:
    """Of these, what differs between nodes and is known without a measurement."""
    found = [*different_versions(nodes), *devices(nodes), *cards(nodes), *environment(nodes)]
    return sorted(found, key=lambda finding: -finding.weight)


def usual(values: Iterable[str]) -> str:
    """The most frequent value, of several the first: rank 0's, where it is one of them."""
    counts = Counter(values)
    return max(counts, key=lambda value: counts[value])


def different(
    nodes: Sequence[Node], row: str, text: str, value: Callable[[Node], str], weight: Weight = Weight.FAULT
) -> list[Finding]:
    """A finding for each value that is not what most nodes have; text: with {own} and {usual}."""
    most = usual(value(node) for node in nodes)
    others: dict[str, list[str]] = {}
    for node in nodes:
        if value(node) != most:
            others.setdefault(value(node), []).append(node.host)
    return [Finding(tuple(hosts), row, text.format(own=own, usual=most), weight) for own, hosts in others.items()]


def different_versions(nodes: Sequence[Node]) -> list[Finding]:
    """Python differs where its first two numbers do; a driver may be another one."""

    def version(name: str) -> Callable[[Node], str]:
        parts = 2 if name == "python" else None
        return lambda node: ".".join(node.versions.get(name, "none").split(".")[:parts])

    found = []
    for name in SAME_VERSIONS:
        text = f"has {name} {{own}}, the others {{usual}}. Install the same on all nodes"
        found += different(nodes, name, text, version(name))
    drivers = different(nodes, "driver", "has driver {own}, the others {usual}", version("driver"), Weight.WARNING)
    return found + drivers


def devices(nodes: Sequence[Node]) -> list[Finding]:
    """Nodes that compute on the CPU beside others that compute on GPUs, whatever has brought that about."""
    return different(nodes, "device", "computes on {own}, the others on {usual}", lambda node: node.device)


def cards(nodes: Sequence[Node]) -> list[Finding]:
    """GPUs that are too few, of another kind, of no use to torch, or taken by somebody else."""
    found = []
    for node in nodes:
        if node.device == "cuda" and node.seen < len(node.ranks):
            text = f"torch sees {node.seen} GPUs for {len(node.ranks)} ranks"
            found.append(Finding((node.host,), "GPUs", text))
        for number, card in enumerate(node.cards):
            if card.problem:
                found.append(Finding((node.host,), "GPUs", f"torch cannot use GPU {number}: {card.problem}"))
            elif card.free < TAKEN * card.total:
                text = f"{(card.total - card.free) / GB:.0f} of {card.total / GB:.0f} GB of GPU {number} are taken"
                found.append(Finding((node.host,), "GPU memory", f"{text}: look who runs there", Weight.WARNING))
    kind = different(nodes, "GPUs", "has {own}, the others {usual}", told_cards, Weight.WARNING)
    return found + [finding for finding in kind if not any(finding.hosts == other.hosts for other in found)]


def tools(nodes: Sequence[Node]) -> list[Finding]:
    """DeepSpeed loads its extensions by ninja, built ones too; a compiler is needed for those that are not built."""
    found = []
    for node in nodes:
        if not node.tools.get("ninja"):
            text = "no ninja, by which DeepSpeed's extensions are loaded. Run there: pip install ninja"
            found.append(Finding((node.host,), "ninja", text, Weight.FAULT if node.builds else Weight.WARNING))
        if not node.tools.get("c++"):
            text = "no C++ compiler, so that no extension can be built there that is not built yet"
            found.append(Finding((node.host,), "c++", text, Weight.WARNING))
    return found


def inputs(nodes: Sequence[Node]) -> list[Finding]:
    """What a node cannot read, and what is another thing there."""
    found = []
    for name in dict.fromkeys(name for node in nodes for name in node.inputs):
        reading = [node for node in nodes if name in node.inputs]
        missing: dict[str, list[str]] = {}
        for node in reading:
            if node.inputs[name].problem:
                missing.setdefault(node.inputs[name].problem, []).append(node.host)
        found += [Finding(tuple(hosts), name, f"{name}: {problem}") for problem, hosts in missing.items()]
        text = f"{name}: another content than on the other nodes. Copy it again"
        there = [node for node in reading if not node.inputs[name].problem]
        if there:
            found += different(there, name, text, lambda node, name=name: node.inputs[name].content)
    return found


def disks(nodes: Sequence[Node], room: int) -> list[Finding]:
    """Folders that cannot be written to, or have too little room."""
    found = []
    for node in nodes:
        for what, disk in node.disks.items():
            fault = Weight.FAULT if what in (OUTPUT, EXTENSIONS, DATA) else Weight.WARNING
            least = (room or LEAST_CACHE) if what == OUTPUT else LEAST_CACHE
            if disk.problem:
                text = f"nothing can be written to {disk.path} ({what}): {disk.problem}"
                found.append(Finding((node.host,), row_of(what), text, fault))
            elif disk.free < least:
                needed = f"; models and a restart point take {told_bytes(room)}" if what == OUTPUT and room else ""
                text = f"{told_bytes(disk.free)} free at {disk.path} ({what}){needed}"
                short = Weight.FAULT if needed else Weight.WARNING
                found.append(Finding((node.host,), row_of(what), text, short))
        if node.sees_output is False:
            text = "does not see what rank 0 writes beside --output_dir, which has to be one folder for all nodes"
            found.append(Finding((node.host,), "output shared", text))
    return found


def row_of(what: str) -> str:
    """The row of a folder's disk."""
    return f"free, {what}"


def memory(nodes: Sequence[Node]) -> list[Finding]:
    """Hosts with much less memory than others, and shared memory that is too small for ranks with GPUs."""
    found, most = [], max(node.available for node in nodes)
    for node in nodes:
        if node.available < most / 2:
            text = f"{told_bytes(node.available)} of host memory are free, elsewhere {told_bytes(most)}"
            found.append(Finding((node.host,), "host memory", text, Weight.WARNING))
        shared, needed = node.shared_memory, node.device == "cuda" and len(node.ranks) > 1
        if shared.problem:
            text = f"nothing can be written to {shared.path}: {shared.problem}"
            found.append(Finding((node.host,), "/dev/shm", text))
        elif needed and shared.free < LEAST_SHARED:
            text = f"{told_bytes(shared.free)} free in {shared.path}, by which ranks of a node exchange (--shm-size)"
            found.append(Finding((node.host,), "/dev/shm", text, Weight.WARNING))
    return found


def environment(nodes: Sequence[Node]) -> list[Finding]:
    """Variables that libraries read and that are not the same; interfaces may well be called otherwise."""
    found = []
    for name in dict.fromkeys(name for node in nodes for name in node.environment):
        text = f"{name} is {{own}}, on the others {{usual}}. Have the launcher pass it on (.deepspeed_env), or unset it"
        found += different(
            nodes, name, text, lambda node, name=name: node.environment.get(name, "not set"), Weight.WARNING
        )
    return [one for one in found if not one.row.endswith("_IFNAME")]


def clocks(nodes: Sequence[Node]) -> list[Finding]:
    """Clocks that are further apart than their measurement may be wrong."""
    return [
        Finding((node.host,), "clock", f"its clock is {node.clock.ahead:+.1f} s from rank 0's", Weight.WARNING)
        for node in nodes
        if node.clock is not None and abs(node.clock.ahead) > CLOCKS + node.clock.within
    ]


def absent(expected: Mapping[int, str], heard: Iterable[int], seconds: float) -> list[Finding]:
    """Ranks that have not said anything within so many seconds. expected: every rank's host, "" where the launcher does
    not tell it."""
    missing: dict[str, list[int]] = {}
    reported = set(heard)
    for rank, host in expected.items():
        if rank not in reported:
            missing.setdefault(host, []).append(rank)
    return [
        Finding(
            (host or told_ranks(ranks),),
            "report",
            f"no answer{f' from {told_ranks(ranks)}' if host else ''} within {seconds:.0f} s: the host is not reached, "
            "or the program does not start there (what the launcher prints says why)",
        )
        for host, ranks in missing.items()
    ]


def cannot_begin(message: str) -> Finding:
    """Of a rank that has said why its program does not come so far: "error: on gpu02: the program cannot begin ..."."""
    match = re.fullmatch(r"error: (?:on (\S+): )?(.*)", message, re.DOTALL)
    host, text = (match[1], match[2]) if match else (None, message)
    return Finding((host or "a host",), "report", text)
