"""The table of nodes: a column a node, or a column for all nodes that are alike, where there are many."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from training.preflight.comparison import Finding, Weight, row_of
from training.preflight.node import Disk, Node
from training.preflight.words import told_bytes, told_cards, told_hosts, told_ranks

EACH_ITS_OWN = 4  # nodes with a column each; of more, those that are alike share one
COLUMNS = 6  # that are shown; findings name the nodes of the others
WIDEST = 44  # characters of a cell


@dataclass(frozen=True, slots=True)
class Row:
    """What is told of each node. least: of a measured amount, by which nodes are not told apart: a shared column shows
    the node that has least."""

    name: str
    cell: Callable[[Node], str]
    least: Callable[[Node], float] | None = None


def table(nodes: Sequence[Node], findings: Sequence[Finding]) -> list[str]:
    """Its lines; a cell that a finding is about begins with "!"."""
    rows = rows_of(nodes)
    columns = grouped(nodes, rows, findings)
    shown, left = columns[:COLUMNS], columns[COLUMNS:]
    missing = [host for one in findings if one.row == "report" for host in one.hosts]
    cells = [["", *(told_hosts([node.host for node in column]) for column in shown), *missing]]
    cells += [
        [_shortened(row.name), *(_cell(row, column, findings) for column in shown), *("! no answer" for _ in missing)]
        for row in rows
    ]
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    if left:
        names = told_hosts([node.host for column in left for node in column])
        lines.append(f"not shown: {len(left)} more kinds of nodes ({names})")
    return lines


def told(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, those of nodes with the same in one."""
    return [f"{one.weight.name.lower()}: {told_hosts(one.hosts)}: {one.text}" for one in findings]


def verdict(nodes: int, findings: Sequence[Finding]) -> str:
    """The last line: healthy, or which nodes are at fault."""
    faults = [finding for finding in findings if finding.weight is Weight.FAULT]
    if faults:
        hosts = list(dict.fromkeys(host for fault in faults for host in fault.hosts))
        return f"preflight: at fault: {told_hosts(hosts)}"
    count = "1 node is" if nodes == 1 else f"all {nodes} nodes are"
    warnings = f", with {len(findings)} warning{'s' * (len(findings) > 1)}" if findings else ""
    return f"preflight: {count} healthy{warnings}"


def rows_of(nodes: Sequence[Node]) -> list[Row]:
    """What is shown: of versions, disks, inputs, tools and variables those that any node has."""
    return [*_of_software(nodes), *_of_hardware(nodes), *_of_folders(nodes), *_of_surroundings(nodes)]


def _every(nodes: Sequence[Node], names: Callable[[Node], Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for node in nodes for name in names(node)))


def _of_software(nodes: Sequence[Node]) -> Iterator[Row]:
    yield Row("ranks", lambda node: told_ranks(node.ranks), lambda node: min(node.ranks, default=0))
    for name in _every(nodes, lambda node: (one for one, version in node.versions.items() if version != "none")):
        yield Row(name, lambda node, name=name: node.versions.get(name, "none"))
    for name in _every(nodes, lambda node: (one for one, version in node.tools.items() if version)):
        yield Row(name, lambda node, name=name: node.tools.get(name) or "none")
    if not any(node.tools.get("ninja") for node in nodes):
        yield Row("ninja", lambda node: "none")


def _of_hardware(nodes: Sequence[Node]) -> Iterator[Row]:
    if any(node.device == "cuda" for node in nodes):
        yield Row("GPUs", told_cards)
        yield Row("GPU memory", _card_memory, lambda node: min((card.free for card in node.cards), default=0))
    yield Row("host memory", _memory, lambda node: node.available)
    yield Row("/dev/shm", lambda node: _disk(node.shared_memory), lambda node: node.shared_memory.free)
    if any(node.network for node in nodes):
        yield Row("network", lambda node: node.network or "not told")


def _of_folders(nodes: Sequence[Node]) -> Iterator[Row]:
    for what in _every(nodes, lambda node: node.disks):
        yield Row(
            row_of(what),
            lambda node, what=what: _disk(node.disks[what]),
            lambda node, what=what: node.disks[what].free,
        )
    if any(node.sees_output is not None for node in nodes):
        yield Row("output shared", lambda node: {None: "-", True: "yes", False: "no"}[node.sees_output])
    for name in _every(nodes, lambda node: node.inputs):
        yield Row(name, lambda node, name=name: _input(node, name))


def _of_surroundings(nodes: Sequence[Node]) -> Iterator[Row]:
    if len(nodes) > 1:
        yield Row("clock", _clock, lambda node: -abs(node.clock.ahead) if node.clock else 0.0)
    for name in _every(nodes, lambda node: node.environment):
        yield Row(name, lambda node, name=name: node.environment.get(name, "not set"))


def grouped(nodes: Sequence[Node], rows: Sequence[Row], findings: Sequence[Finding]) -> list[list[Node]]:
    """The columns' nodes, those with findings first; each node its own where there are few."""
    if len(nodes) <= EACH_ITS_OWN:
        return [[node] for node in nodes]
    groups: dict[tuple, list[Node]] = {}
    for node in nodes:
        own = tuple(finding.row for finding in findings if node.host in finding.hosts)
        groups.setdefault((own, *(row.cell(node) for row in rows if row.least is None)), []).append(node)
    return [groups[key] for key in sorted(groups, key=lambda key: not key[0])]


def _cell(row: Row, column: Sequence[Node], findings: Sequence[Finding]) -> str:
    node, more = column[0], ""
    if row.least is not None and len(column) > 1:
        node = min(column, key=row.least)
        more = " or more" if row.name.startswith(("free", "host", "GPU", "/dev")) else ""
    wrong = any(finding.row == row.name and node.host in finding.hosts for finding in findings)
    text = f"{len(column)} x {len(node.ranks)} ranks" if row.name == "ranks" and len(column) > 1 else row.cell(node)
    text = f"{'! ' * wrong}{text}{more}"
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _shortened(name: str) -> str:
    """The name of a row; of a long path its end."""
    flag, _, value = name.partition(" ")
    return name if len(name) <= WIDEST or not value else f"{flag} ...{value[-max(20, WIDEST - len(flag) - 4) :]}"


def _disk(disk: Disk) -> str:
    return disk.problem.partition(":")[0] if disk.problem else told_bytes(disk.free)


def _memory(node: Node) -> str:
    return f"{told_bytes(node.available)} of {told_bytes(node.memory)} free"


def _card_memory(node: Node) -> str:
    if not node.cards:
        return "none"
    card = min(node.cards, key=lambda card: card.free)
    return f"{told_bytes(card.free)} of {told_bytes(card.total)} free"


def _input(node: Node, name: str) -> str:
    found = node.inputs.get(name)
    if found is None or found.problem:
        return "not readable" if found else "not looked at"
    return found.content.rpartition(" ")[2][:8] or "on the Hub"


def _clock(node: Node) -> str:
    if node.clock is None:
        return "rank 0's"
    return f"{node.clock.ahead:+.3f} s (+-{node.clock.within:.3f})"
