"""What is wrong with nodes is found, with the host's name, by facts that are written by hand."""

from dataclasses import replace

import pytest

from tests.training.preflight.nodes import A100, MODEL, healthy
from training.preflight.comparison import (
    Finding,
    Weight,
    absent,
    cannot_begin,
    findings,
    in_short,
    told_bytes,
    told_ranks,
)
from training.preflight.node import DATA, HUB, OUTPUT, Clock, Disk, Input, Node

FIRST = healthy()


def of_second(**changes) -> list[tuple[str, str, str]]:
    """Hosts, text and weight of what is found where the second of three nodes has these changes."""
    nodes = [FIRST, healthy("gpu02", 2, **changes), healthy("gpu03", 4)]
    return [(", ".join(one.hosts), one.text, one.weight.name) for one in findings(nodes)]


def with_disk(what: str, **changes) -> dict:
    return {"disks": {**FIRST.disks, what: replace(FIRST.disks[what], **changes)}}


def test_nothing_is_found_of_healthy_nodes():
    assert of_second() == []


def test_a_node_is_the_same_behind_its_journey():
    assert Node.of_json(healthy("gpu02", 2).as_json()) == healthy("gpu02", 2)


@pytest.mark.parametrize(
    ("changes", "told", "weight"),
    [
        ({"versions": {**FIRST.versions, "deepspeed": "0.19.7"}}, "has deepspeed 0.19.7, the others 0.19.8", "FAULT"),
        ({"versions": {**FIRST.versions, "torch": "2.12.1"}}, "has torch 2.12.1, the others 2.13.0", "FAULT"),
        ({"versions": {**FIRST.versions, "python": "3.11.9"}}, "has python 3.11, the others 3.12", "FAULT"),
        ({"versions": {**FIRST.versions, "driver": "550.9"}}, "has driver 550.9, the others 580.1", "WARNING"),
        ({"tools": {"ninja": "", "c++": "13.2"}}, "no ninja", "FAULT"),
        ({"tools": {"ninja": "", "c++": "13.2"}, "builds": False}, "no ninja", "WARNING"),
        ({"tools": {"ninja": "1.13.0", "c++": ""}}, "no C++ compiler", "WARNING"),
        ({"inputs": {MODEL: Input(problem="there is no sft")}}, f"{MODEL}: there is no sft", "FAULT"),
        ({"inputs": {MODEL: Input(content="77")}}, f"{MODEL}: another content than on the other nodes", "FAULT"),
        (with_disk(OUTPUT, problem="No space left on device"), "nothing can be written to /output (output)", "FAULT"),
        (with_disk(DATA, problem="Read-only file system"), "nothing can be written to /tokenised data", "FAULT"),
        (with_disk(HUB, problem="Read-only file system"), "nothing can be written to /models of the Hub", "WARNING"),
        (with_disk(DATA, free=20_000_000), "20 MB free at /tokenised data", "WARNING"),
        ({"sees_output": False}, "does not see what rank 0 writes beside --output_dir", "FAULT"),
        ({"seen": 1}, "torch sees 1 GPUs for 2 ranks", "FAULT"),
        ({"cards": (A100, replace(A100, problem="no kernel image"))}, "torch cannot use GPU 1: no kernel", "FAULT"),
        ({"cards": (replace(A100, free=60_000_000_000), A100)}, "25 of 85 GB of GPU 0 are taken", "WARNING"),
        ({"cards": (A100, replace(A100, name="NVIDIA L4"))}, "has 1 x NVIDIA A100-SXM4-80GB (8.0), 1 x", "WARNING"),
        ({"available": 300_000_000_000}, "300 GB of host memory are free, elsewhere 900 GB", "WARNING"),
        ({"shared_memory": Disk(path="/dev/shm", free=64_000_000)}, "64 MB free in /dev/shm", "WARNING"),
        ({"environment": {"NCCL_DEBUG": "INFO"}}, "NCCL_DEBUG is INFO, on the others WARN", "WARNING"),
        ({"environment": {}}, "NCCL_DEBUG is not set, on the others WARN", "WARNING"),
        ({"environment": {"NCCL_DEBUG": "WARN", "DS_ACCELERATOR": "cuda"}}, "DS_ACCELERATOR is cuda, on", "WARNING"),
        ({"clock": Clock(ahead=-1.2, within=0.1)}, "its clock is -1.2 s from rank 0's", "WARNING"),
        ({"device": "cpu", "cards": FIRST.cards}, "computes on cpu, the others on cuda", "FAULT"),
    ],
)
def test_what_is_wrong_with_one_node_is_told_of_that_one(changes, told, weight):
    ((host, text, found),) = of_second(**changes)
    assert (host, found) == ("gpu02", weight)
    assert text.startswith(told)


def test_interfaces_may_be_called_otherwise_and_clocks_be_apart_as_far_as_they_are_known():
    assert of_second(environment={"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth1"}) == []
    assert of_second(clock=Clock(ahead=1.2, within=0.3)) == []


def test_of_two_nodes_the_one_without_rank_0_is_the_other_one():
    other = healthy("gpu02", 2, versions={**FIRST.versions, "torch": "2.12.1"})
    assert [(one.hosts, one.row) for one in findings([FIRST, other])] == [(("gpu02",), "torch")]
    same = healthy("gpu03", 4, versions=other.versions)
    assert [one.hosts for one in findings([FIRST, other, same])] == [("gpu01",)]


def test_a_run_needs_room_for_its_models_and_a_point():
    nodes = [FIRST, healthy("gpu02", 2, **with_disk(OUTPUT, free=3_000_000_000))]
    assert findings(nodes, room=3_000_000_000) == []
    (found,) = findings(nodes, room=4_000_000_000)
    assert found.hosts == ("gpu02",)
    assert found.text == "3.0 GB free at /output (output); models and a restart point take 4.0 GB"
    assert found.weight is Weight.FAULT


def test_in_short_only_what_needs_no_measurement_is_compared():
    other = healthy("gpu02", 2, versions={**FIRST.versions, "torch": "2.12.1"}, tools={}, inputs={}, available=1)
    assert [one.row for one in in_short([FIRST, other])] == ["torch"]


def test_what_ranks_compute_on_decides_and_not_the_variable_that_chose_it():
    named = healthy("gpu02", 2, environment={"NCCL_DEBUG": "WARN", "DS_ACCELERATOR": "cuda"})
    assert [(one.row, one.weight) for one in in_short([FIRST, named])] == [("DS_ACCELERATOR", Weight.WARNING)]
    other = healthy("gpu02", 2, device="cpu", cards=())
    found = {one.row: one.weight for one in in_short([FIRST, other])}
    assert found == {"device": Weight.FAULT, "GPUs": Weight.WARNING}


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


def test_numbers_in_words():
    assert [told_ranks(ranks) for ranks in ([3], [8, 9, 10], [1, 5])] == ["rank 3", "ranks 8 to 10", "ranks 1, 5"]
    assert [told_bytes(size) for size in (999, 1500, 64e6, 1.5e9, 2e12)] == [
        "999 B",
        "1.5 kB",
        "64 MB",
        "1.5 GB",
        "2.0 TB",
    ]
