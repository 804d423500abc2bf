"""What is wrong with nodes is found, with the host's name, and shown, by facts that are written by hand."""

import pytest

from tests.training.tools.preflight.nodes import MODEL, healthy
from training.tools.preflight.facts import Fact
from training.tools.preflight.table import (
    Finding,
    absent,
    cannot_begin,
    findings,
    hosts_in_short,
    lines_of,
    ranks_in_short,
    table,
    verdict,
)

TWO = [healthy(), healthy("gpu02", 2)]
TORCH = Fact(shown="2.12.1", same="2.12.1", remedy="Install the same on all nodes")


def test_nothing_is_found_of_healthy_nodes():
    assert findings([*TWO, healthy("gpu03", 4)]) == []


@pytest.mark.parametrize(
    ("row", "fact", "told", "warning"),
    [
        ("torch", TORCH, "has torch 2.12.1, the others 2.13.0. Install the same on all nodes", False),
        ("python", Fact(shown="3.11.9", same="3.11"), "has python 3.11.9, the others 3.12.1. Install the same", False),
        ("driver", Fact(shown="550.9", same="550.9", warning=True), "has driver 550.9, the others 580.1", True),
        ("driver", None, "has driver none, the others 580.1", True),
        ("device", Fact(shown="cpu", same="cpu"), "has device cpu, the others cuda", False),
        ("ninja", Fact(shown="none", problem="no ninja"), "no ninja", False),
        ("NCCL_DEBUG", None, "has NCCL_DEBUG none, the others WARN. Have the launcher pass it on", True),
        (MODEL, Fact(shown="77", same="77"), f"has {MODEL} 77, the others 3f0c3f0c. Copy it again", False),
        (MODEL, Fact(shown="not readable", problem="there is no sft"), "there is no sft", False),
        ("host memory", Fact(shown="300 GB of 1.0 TB free", amount=300e9, warning=True), "300 GB of host memory", True),
    ],
)
def test_what_is_wrong_with_one_node_is_told_of_that_one(row, fact, told, warning):
    (found,) = findings([healthy(), healthy("gpu02", 2, **{row: fact}), healthy("gpu03", 4)])
    assert (found.hosts, found.row, found.warning) == (("gpu02",), row, warning)
    assert found.text.startswith(told)


def test_what_need_not_be_the_same_is_not_compared():
    others = {"python": Fact(shown="3.12.3", same="3.12"), "network": Fact(shown="eth0 25 Gb/s")}
    assert findings([healthy(), healthy("gpu02", 2, **others)]) == []


def test_of_two_nodes_the_one_without_rank_0_is_the_other_one():
    other, same = healthy("gpu02", 2, torch=TORCH), healthy("gpu03", 4, torch=TORCH)
    assert [(one.hosts, one.row) for one in findings([healthy(), other])] == [(("gpu02",), "torch")]
    assert [one.hosts for one in findings([healthy(), other, same])] == [("gpu01",)]


def test_nodes_with_the_same_fault_are_one_finding_and_faults_come_first():
    nodes = [healthy(), *(healthy(f"gpu0{number}", 2 * number, torch=TORCH, driver=None) for number in (2, 3))]
    nodes += [healthy(f"gpu0{number}", 2 * number) for number in (4, 5)]
    assert [(one.hosts, one.row, one.warning) for one in findings(nodes)] == [
        (("gpu02", "gpu03"), "torch", False),
        (("gpu02", "gpu03"), "driver", True),
    ]


def test_ranks_that_have_not_answered_are_named_by_their_hosts_where_these_are_known():
    expected = {0: "gpu01", 1: "gpu01", 2: "gpu02", 3: "gpu02", 4: "", 5: ""}
    known, unknown = absent(expected, [0, 1, 3], 45.0)
    assert (known.hosts, known.row) == (("gpu02",), "report")
    assert known.text.startswith("no answer from rank 2 within 45 s")
    assert unknown == Finding(("ranks 4 to 5",), "report", unknown.text)
    assert unknown.text.startswith("no answer within 45 s")


def test_a_rank_that_cannot_begin_is_told_of_its_host():
    assert cannot_begin("error: on gpu02: the program cannot begin: ImportError: no peft (a.py, line 3).") == Finding(
        ("gpu02",), "report", "the program cannot begin: ImportError: no peft (a.py, line 3)."
    )
    assert cannot_begin("rank 1 sees no GPU").hosts == ("a host",)


def cells(lines: list[str], row: str) -> list[str]:
    """The cells of a row, by where the columns begin."""
    rule = lines[1]
    starts = [place for place, sign in enumerate(rule) if sign == "-" and (place == 0 or rule[place - 1] == " ")]
    line = next(line for line in lines if line.startswith(f"{row} "))
    return [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)][1:]


def test_two_nodes_have_a_column_each():
    lines = table(TWO, [])
    assert lines[0].split() == ["gpu01", "gpu02"]
    assert cells(lines, "ranks") == ["ranks 0 to 1", "ranks 2 to 3"]
    assert cells(lines, "torch") == ["2.13.0", "2.13.0"]
    assert cells(lines, "GPUs") == ["2 x NVIDIA A100-SXM4-80GB (8.0)"] * 2
    assert cells(lines, "free, output") == ["700 GB", "700 GB"]
    assert cells(lines, MODEL) == ["3f0c3f0c", "3f0c3f0c"]
    assert not any("!" in line for line in lines)


def test_cells_that_are_wrong_are_marked_and_nodes_that_are_absent_have_a_column():
    wrong = {
        "free, tokenised data": Fact(shown="No space left on device", problem="nothing can be written", amount=0),
        "ninja": Fact(shown="none", problem="no ninja"),
        MODEL: Fact(shown="not readable", problem="there is no sft"),
    }
    nodes = [healthy(**{"free, tokenised data": Fact(shown="700 GB", amount=700e9)}), healthy("gpu02", 2, **wrong)]
    found = [*absent({0: "gpu01", 1: "gpu01", 2: "gpu02", 3: "gpu02", 4: "gpu03"}, range(4), 45.0), *findings(nodes)]
    lines = table(nodes, found)
    assert lines[0].split() == ["gpu01", "gpu02", "gpu03"]
    assert cells(lines, MODEL) == ["3f0c3f0c", "! not readable", "! no answer"]
    assert cells(lines, "free, tokenised data") == ["700 GB", "! No space left on device", "! no answer"]
    assert cells(lines, "ninja") == ["1.13.0", "! none", "! no answer"]
    assert verdict(2, found) == "preflight: at fault: gpu03, gpu02"


def test_many_nodes_share_a_column_with_the_least_of_what_is_measured():
    def memory(number: int) -> Fact:
        return Fact(shown=f"{900 - number} GB of 1.0 TB free", amount=(900 - number) * 1e9, warning=True)

    nodes = [healthy(f"gpu{number:02d}", 2 * number, **{"host memory": memory(number)}) for number in range(64)]
    nodes[7] = healthy("gpu07", 14, torch=TORCH)
    lines = table(nodes, findings(nodes))
    assert lines[0].split("  ")[-1].strip() == "gpu[00-06,08-63] (63 nodes)"
    assert cells(lines, "torch") == ["! 2.12.1", "2.13.0"]
    assert cells(lines, "host memory")[-1] == "837 GB of 1.0 TB free or more"  # gpu63's
    assert cells(lines, "ranks")[-1] == "63 x 2 ranks"
    assert max(map(len, lines)) < 200


def test_kinds_of_nodes_beyond_the_columns_are_named():
    nodes = [healthy(f"gpu{number}", 2 * number, NCCL_DEBUG=Fact(shown=str(number))) for number in range(8)]
    assert table(nodes, [])[-1] == "not shown: 2 more kinds of nodes (gpu6, gpu7)"


def test_hosts_and_ranks_in_few_words():
    assert hosts_in_short(["b", "a"]) == "b, a"
    assert hosts_in_short(["gpu08", "gpu09", "gpu10", "gpu12"]) == "gpu[08-10,12] (4 nodes)"
    assert hosts_in_short(["n1-ib", "n2-ib", "login"]) == "n[1-2]-ib, login (3 nodes)"
    assert hosts_in_short(["box", "box", "box"]) == "box (3 nodes)"
    assert [ranks_in_short(ranks) for ranks in ([3], [8, 9, 10], [1, 5])] == ["rank 3", "ranks 8 to 10", "ranks 1, 5"]


def test_findings_and_verdict_are_a_line_each():
    warning = Finding(("gpu02",), "driver", "has driver 550.9, the others 580.1", warning=True)
    assert lines_of([warning]) == ["warning: gpu02: has driver 550.9, the others 580.1"]
    assert verdict(2, []) == "preflight: all 2 nodes are healthy"
    assert verdict(1, []) == "preflight: 1 node is healthy"
    assert verdict(2, [warning]) == "preflight: all 2 nodes are healthy, with 1 warning"
    assert verdict(2, [warning, Finding(("gpu01",), "ninja", "no ninja")]) == "preflight: at fault: gpu01"
