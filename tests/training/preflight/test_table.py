"""The table has a column a node, or one for nodes that are alike; lines name hosts in few words."""

from tests.training.preflight.nodes import MODEL, healthy
from training.preflight.comparison import Finding, Weight, absent, findings
from training.preflight.node import DATA, Disk, Input
from training.preflight.table import table, told, verdict
from training.preflight.words import told_hosts

TWO = [healthy(), healthy("gpu02", 2)]


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
    assert cells(lines, "GPU memory") == ["84 GB of 85 GB free"] * 2
    assert cells(lines, "free, output") == ["700 GB", "700 GB"]
    assert cells(lines, "output shared") == ["-", "yes"]
    assert cells(lines, MODEL) == ["3f0c3f0c", "3f0c3f0c"]
    assert cells(lines, "clock") == ["rank 0's", "+0.250 s (+-0.010)"]
    assert not any("!" in line for line in lines)


def test_cells_that_are_wrong_are_marked_and_nodes_that_are_absent_have_a_column():
    disks = {**TWO[0].disks, DATA: Disk(path="/data", free=0, problem="No space left on device: free some space")}
    nodes = [TWO[0], healthy("gpu02", 2, disks=disks, inputs={MODEL: Input(problem="there is no sft")}, tools={})]
    found = [*absent({0: "gpu01", 1: "gpu01", 2: "gpu02", 3: "gpu02", 4: "gpu03"}, range(4), 45.0), *findings(nodes)]
    lines = table(nodes, found)
    assert lines[0].split() == ["gpu01", "gpu02", "gpu03"]
    assert cells(lines, MODEL) == ["3f0c3f0c", "! not readable", "! no answer"]
    assert cells(lines, "free, tokenised data") == ["700 GB", "! No space left on device", "! no answer"]
    assert cells(lines, "ninja") == ["1.13.0", "! none", "! no answer"]
    assert verdict(2, found) == "preflight: at fault: gpu03, gpu02"


def test_many_nodes_share_a_column_with_the_least_of_what_is_measured():
    nodes = [healthy(f"gpu{number:02d}", 2 * number, available=(900 - number) * 10**9) for number in range(64)]
    nodes[7] = healthy("gpu07", 14, versions={**nodes[0].versions, "torch": "2.12.1"})
    lines = table(nodes, findings(nodes))
    assert lines[0].split("  ")[-1].strip() == "gpu[01-06,08-63] (62 nodes)"
    assert cells(lines, "torch") == ["! 2.12.1", "2.13.0", "2.13.0"]
    assert cells(lines, "host memory")[-1] == "837 GB of 1.0 TB free or more"  # gpu63's
    assert cells(lines, "ranks")[-1] == "62 x 2 ranks"
    assert max(map(len, lines)) < 200


def test_kinds_of_nodes_beyond_the_columns_are_named():
    nodes = [healthy(f"gpu{number}", 2 * number, environment={"NCCL_DEBUG": str(number)}) for number in range(8)]
    assert table(nodes, [])[-1] == "not shown: 2 more kinds of nodes (gpu6, gpu7)"


def test_hosts_in_few_words():
    assert told_hosts(["b", "a"]) == "b, a"
    assert told_hosts(["gpu08", "gpu09", "gpu10", "gpu12"]) == "gpu[08-10,12] (4 nodes)"
    assert told_hosts(["n1-ib", "n2-ib", "login"]) == "n[1-2]-ib, login (3 nodes)"


def test_findings_and_verdict_are_a_line_each():
    warning = Finding(("gpu02",), "clock", "its clock is +2.0 s from rank 0's", Weight.WARNING)
    assert told([warning]) == ["warning: gpu02: its clock is +2.0 s from rank 0's"]
    assert verdict(2, []) == "preflight: all 2 nodes are healthy"
    assert verdict(1, []) == "preflight: 1 node is healthy"
    assert verdict(2, [warning]) == "preflight: all 2 nodes are healthy, with 1 warning"
    assert verdict(2, [warning, Finding(("gpu01",), "ninja", "no ninja")]) == "preflight: at fault: gpu01"
