"""Finds problems of nodes and differences between nodes, and makes a table of all facts. Each node has a column; with
many nodes, those with equal facts share a column."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from training.tools.preflight.facts import MEMORY, Fact, Facts, bytes_in_short

EACH_ITS_OWN = 4  # up to so many nodes have a column each; if there are more, nodes with equal facts share a column
COLUMNS = 6  # largest number of columns; findings also name the nodes of columns that are not shown
WIDEST = 44  # largest number of characters in a cell
NONE = Fact(shown="none", same="none")  # stands for a fact that only other nodes have


@dataclass(frozen=True, slots=True)
class Node:
    """One host of the run. ranks: its ranks. facts: {row of the table: fact}."""

    host: str
    ranks: tuple[int, ...]
    facts: Facts

    def fact(self, row: str) -> Fact:
        """The node's fact in this row; NONE if the node has none."""
        return self.facts.get(row, NONE)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem, or a difference between nodes: the hosts that have it, its row in the table, and a text without the
    hosts' names. warning: whether a run can go on in spite of it."""

    hosts: tuple[str, ...]
    row: str
    text: str
    warning: bool = False


def findings(nodes: Sequence[Node]) -> list[Finding]:
    """All findings about the nodes, faults before warnings."""
    found: dict[tuple[str, str, bool], list[str]] = {}  # {(row, text, whether it is a warning): hosts}
    for row in rows_of(nodes):
        facts = [node.fact(row) for node in nodes]
        usual = _usual([fact for fact in facts if not fact.problem])
        amounts = [fact.amount for fact in facts if fact.amount is not None]
        for node, fact in zip(nodes, facts, strict=True):
            text = fact.problem
            if not text and usual and None not in (fact.same, usual.same) and fact.same != usual.same:
                remedy = fact.remedy or usual.remedy
                text = f"has {row} {fact.shown}, the others {usual.shown}{f'. {remedy}' if remedy else ''}"
            if not text and row == MEMORY and (free := fact.amount or 0) < (most := max(amounts)) / 2:
                text = f"{bytes_in_short(free)} of host memory are free, elsewhere {bytes_in_short(most)}"
            if text:
                warning = fact.warning or (fact is NONE and usual is not None and usual.warning)
                found.setdefault((row, text, warning), []).append(node.host)
    return sorted(
        (Finding(tuple(hosts), row, text, warning) for (row, text, warning), hosts in found.items()),
        key=lambda finding: finding.warning,
    )


def _usual(facts: Sequence[Fact]) -> Fact | None:
    """The first fact that has the most frequent value; of several equally frequent values, the one that comes first
    counts."""
    counts = Counter(fact.same for fact in facts)
    return max(facts, key=lambda fact: counts[fact.same], default=None)


def absent(expected: Mapping[int, str], heard: Iterable[int], seconds: float) -> list[Finding]:
    """The findings about ranks that have posted nothing within `seconds`. expected: {rank: its host, or "" if the
    launcher does not tell it}. heard: the ranks that have posted."""
    missing: dict[str, list[int]] = {}
    for rank in sorted(set(expected) - set(heard)):
        missing.setdefault(expected[rank], []).append(rank)
    return [
        Finding(
            (host or ranks_in_short(ranks),),
            "report",
            f"no answer{f' from {ranks_in_short(ranks)}' if host else ''} within {seconds:.0f} s: the host is not "
            "reached, or the program does not start there (what the launcher prints says why)",
        )
        for host, ranks in missing.items()
    ]


def cannot_begin(message: str) -> Finding:
    """The finding from a rank's message that its program cannot begin: "error: on gpu02: the program cannot ..."."""
    match = re.fullmatch(r"error: (?:on (\S+): )?(.*)", message, re.DOTALL)
    host, text = (match[1], match[2]) if match else (None, message)
    return Finding((host or "a host",), "report", text)


def table(nodes: Sequence[Node], found: Sequence[Finding]) -> list[str]:
    """The lines of the table. A cell with a finding begins with "!"."""
    rows = rows_of(nodes)
    columns = _columns(nodes, rows, found)
    shown, left = columns[:COLUMNS], columns[COLUMNS:]
    missing = [host for one in found if one.row == "report" for host in one.hosts]
    cells = [["", *(hosts_in_short([node.host for node in column]) for column in shown), *missing]]
    ranks = (
        ranks_in_short(column[0].ranks) if len(column) == 1 else f"{len(column)} x {len(column[0].ranks)} ranks"
        for column in shown
    )
    cells.append(["ranks", *ranks, *("! no answer" for _ in missing)])
    for row in rows:
        flag, _, value = row.partition(" ")
        long = len(row) > WIDEST and value  # a long path is shown by its end
        name = f"{flag} ...{value[-max(20, WIDEST - len(flag) - 4) :]}" if long else row
        cells.append([name, *(_cell(row, column, found) for column in shown), *("! no answer" for _ in missing)])
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    if left:
        names = hosts_in_short([node.host for column in left for node in column])
        lines.append(f"not shown: {len(left)} more kinds of nodes ({names})")
    return lines


def rows_of(nodes: Sequence[Node]) -> list[str]:
    """The names of all rows in which at least one node has a value or a problem."""
    rows = dict.fromkeys(row for node in nodes for row in node.facts)
    return [row for row in rows if any(node.fact(row).problem or node.fact(row).shown != "none" for node in nodes)]


def _columns(nodes: Sequence[Node], rows: Sequence[str], found: Sequence[Finding]) -> list[list[Node]]:
    """The nodes of each column of the table. With at most EACH_ITS_OWN nodes, each column has one node. With more,
    nodes whose cells and findings are equal share a column, and columns without findings come last."""
    if len(nodes) <= EACH_ITS_OWN:
        return [[node] for node in nodes]
    groups: dict[tuple, list[Node]] = {}
    for node in nodes:
        own = tuple(finding.row for finding in found if node.host in finding.hosts)
        facts = [node.fact(row) for row in rows]
        groups.setdefault((own, *(fact.shown for fact in facts if fact.amount is None)), []).append(node)
    return [groups[key] for key in sorted(groups, key=lambda key: not key[0])]


def _cell(row: str, column: Sequence[Node], found: Sequence[Finding]) -> str:
    """The text of a cell; in a column of several nodes, the text of the node with the smallest amount."""
    node = min(column, key=lambda node: node.fact(row).amount or 0)
    more = " or more" if len(column) > 1 and node.fact(row).amount is not None else ""
    wrong = any(finding.row == row and node.host in finding.hosts for finding in found)
    text = f"{'! ' * wrong}{node.fact(row).shown}{more}"
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def lines_of(found: Sequence[Finding]) -> list[str]:
    """A line for each finding."""
    return [f"{'warning' if one.warning else 'fault'}: {hosts_in_short(one.hosts)}: {one.text}" for one in found]


def verdict(nodes: int, found: Sequence[Finding]) -> str:
    """The last line: healthy, or which nodes are at fault."""
    faults = [finding for finding in found if not finding.warning]
    if faults:
        hosts = list(dict.fromkeys(host for fault in faults for host in fault.hosts))
        return f"preflight: at fault: {hosts_in_short(hosts)}"
    count = "1 node is" if nodes == 1 else f"all {nodes} nodes are"
    warnings = f", with {len(found)} warning{'s' * (len(found) > 1)}" if found else ""
    return f"preflight: {count} healthy{warnings}"


def ranks_in_short(ranks: Sequence[int]) -> str:
    """Ranks in a short text: "rank 3", "ranks 8 to 15", "ranks 1, 5, 7"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    run = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]} to {ranks[-1]}" if run else f"ranks {', '.join(map(str, ranks))}"


def hosts_in_short(hosts: Sequence[str]) -> str:
    """Host names in a short text: "gpu[01-03,07] (4 nodes)", "node-a, node-b"."""
    if len(hosts) <= 2:
        return ", ".join(hosts)
    alike: dict[tuple[str, str, int], list[str]] = {}  # {(text before, text after, number of digits): numbers}
    for host in hosts:
        start, number, end = re.fullmatch(r"(.*?)(\d*)(\D*)", host, re.DOTALL).groups()  # type: ignore[union-attr]
        alike.setdefault((start, end, len(number)), []).append(number)
    names = []
    for (start, end, width), numbers in alike.items():
        runs: list[list[str]] = []
        for number in sorted(numbers) if width else ():
            if runs and int(number) == int(runs[-1][-1]) + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        listed = ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        names.append(f"{start}[{listed}]{end}" if len(numbers) > 1 and width else f"{start}{listed}{end}")
    return f"{', '.join(names)} ({len(hosts)} nodes)"
