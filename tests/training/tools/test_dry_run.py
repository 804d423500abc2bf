"""What a dry run counts, and what it says where it is used wrongly. Whole dry runs:
tests/e2e/test_launchers.py.
"""

import os
import sys

import pytest

from training.runtime import start_report
from training.tools import dry_run

HOSTS = "a slots=8\nb slots=8\n# b is slow\nc slots=4\n"


@pytest.fixture
def hosts(tmp_path) -> str:
    (tmp_path / "hosts").write_text(HOSTS)
    return str(tmp_path / "hosts")


@pytest.mark.parametrize(
    "launcher, counts",
    [  # (processes in all, on one node)
        ("deepspeed", (1, 1)),
        ("deepspeed --num_gpus 8", (8, 8)),
        ("deepspeed --num_nodes 4 --num_gpus 8", (32, 8)),
        ("deepspeed --num_gpus=8", (8, 8)),
        ("deepspeed --num_nodes=2 --num_gpus=4 --master_port=1", (8, 4)),
        ("deepspeed --hostfile {hosts} --num_nodes 2", (16, 8)),
        ("deepspeed --hostfile {hosts} --num_gpus 2", (6, 2)),
        ("deepspeed --hostfile={hosts} --num_nodes 2 --num_gpus 3", (6, 3)),
        ("deepspeed --hostfile {hosts}", (20, 8)),
        ("deepspeed -H {hosts} --num_nodes 1", (8, 8)),
        ("deepspeed --hostfile {hosts} --num_nodes 9", (20, 8)),
        ("python", (1, 1)),
        ("", (1, 1)),
    ],
)
def test_counting_processes(launcher, counts, hosts):
    assert dry_run._processes(launcher.format(hosts=hosts).split()) == counts


@pytest.mark.parametrize(
    "launcher, missing",
    [
        ("deepspeed --num_nodes 2", "several nodes need a --hostfile with lines like `node1 slots=8`"),
        (
            "deepspeed --hostfile={hosts} --num_nodes 9",
            "{hosts} names 3 of the 9 nodes asked for, and deepspeed starts on these alone",
        ),
        ("deepspeed -H {hosts} --num_nodes 3", ""),
        ("deepspeed --hostfile {hosts}", ""),
    ],
)
def test_nodes_that_are_missing(launcher, missing, hosts):
    assert dry_run._missing(launcher.format(hosts=hosts).split(), several=True) == missing.format(hosts=hosts)
    assert dry_run._missing(["deepspeed"], several=False) == ""


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "no program in ''. Put `python -m training.tools.dry_run` before a whole command"),
        (["deepspeed", "main.py", "--seed", "1"], "no program in 'deepspeed main.py --seed 1'."),
        (
            ["deepspeed", "--num_gpus", "all", "training/step1_sft.py"],
            "--num_gpus all: give a whole number of at least 1.",
        ),
        (["deepspeed", "--num_gpus", "0", "training/step1_sft.py"], "--num_gpus 0: give a whole number"),
        (["deepspeed", "--num_nodes", "-2", "training/step1_sft.py"], "--num_nodes -2: give a whole number"),
        (["deepspeed", "--hostfile", "{broken}", "training/step1_sft.py"], "--hostfile {broken}: Hostfile contains"),
        (["deepspeed", "--hostfile", "/no/hosts", "training/step1_sft.py"], "--hostfile /no/hosts: there is no such"),
        (["deepspeed", "training/step1_sft.py", "--sed", "1"], "unknown flag --sed. Did you mean --seed?"),
        (["deepspeed", "--module", "training.step1_sft", "--sed", "1"], "unknown flag --sed. Did you mean --seed?"),
    ],
)
def test_wrong_use(words, told, tmp_path, capsys, monkeypatch):
    broken = tmp_path / "hosts"
    broken.write_text("a 8 slots\n")
    for name in ("WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "1")
    assert dry_run.main([word.format(broken=broken) for word in words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: " + told.format(broken=broken)) and printed.err.count("\n") == 1
    assert printed.out == ""


def test_the_command_that_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/training/dry_run.py", "deepspeed", "p.py", "--stop", "a b"])
    assert start_report._command() == "deepspeed p.py --stop 'a b'"
    monkeypatch.setattr(sys, "argv", ["training/step1_sft.py", "--dry_run", "--local_rank=0", "--seed", "1"])
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "16", "LOCAL_SIZE": "8"})
    assert start_report._command() == "deepspeed --num_nodes 2 --num_gpus 8 training/step1_sft.py --seed 1"


def test_data_sets_that_are_not_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "copy").mkdir()
    names = ["Dahoas/rm-static", "owner/copy", "rows.jsonl", "./x", "local/jsonfile", "rm-static", "Dahoas/rm-static"]
    assert start_report.unseen_data(names) == ["Dahoas/rm-static", "rm-static"]
