"""The line of planned and measured memory, of plans written down by hand; what a dry run counts, and what it says where
it is used wrongly. Whole dry runs: tests/e2e/test_launchers.py.
"""

import os
import sys

import pytest
import torch

from engine.errors import UserError
from engine.memory.memory_plan import MemoryPlan, Moment
from engine.memory.workload import Cluster
from engine.memory.zero_memory import Bytes
from engine.rollout import ROLLOUT_BACKENDS
from tests.training.config.command_lines import step3
from training.reporting.step_metrics import PhaseMemory
from training.runtime import dry_run, memory_lines
from training.runtime.memory_lines import comparison, memory_compared

MEASURED = {"generate": 2_000_000_000, "make_experience": 2_500_000_000, "train": 4_100_000_000}


def moment(phase: str, name: str, gb: float) -> Moment:
    return Moment(phase, name, Bytes().add("actor", "weights", gb * 1e9), Bytes(), Bytes())


PLANNED = MemoryPlan(
    moments=(
        moment("load", "actor is loaded", 1),
        moment("generate", "responses are drawn", 3),
        moment("experience", "actor computes", 3.5),
        moment("train", "actor's backward pass", 4),
        moment("train", "actor's optimizer step", 3.75),
    ),
    cluster=Cluster(),
    copies="",
    adam=1_000_000_000,
)


@pytest.mark.parametrize("resumed, generate, experience", [(False, "2.00", "2.50"), (True, "3.00", "3.50")])
def test_a_gpus_peaks_stand_beside_the_plans(resumed, generate, experience):
    """Before a new run trains, Adam's 1 GB is not there; of a resumed one it is."""
    assert comparison(step3(), MEASURED, lambda: PLANNED, resumed) == (
        "memory, planned / measured GB of rank 0 at each phase's peak: "
        f"generate {generate} / 2.00, experience {experience} / 2.50, train 4.00 / 4.10"
    )


def test_what_cannot_be_planned_is_said_and_ends_nothing(monkeypatch):
    def wrong():
        raise UserError("config.json\nis not there")

    figures = "measured GB of rank 0 at each phase's peak: generate 2.00, experience 2.50, train 4.10; not planned: "
    assert comparison(step3(), MEASURED, wrong, False) == f"memory, {figures}config.json is not there"
    monkeypatch.setitem(ROLLOUT_BACKENDS, "mine", lambda *_: None)
    own = comparison(step3(rollout_backend="mine"), MEASURED, lambda: PLANNED, False)
    assert own == f"memory, {figures}--rollout_backend mine is your own"
    rewarded = comparison(step3(reward_function="m:f"), MEASURED, lambda: PLANNED, False)
    assert "train 4.00 / 4.10; --reward_function's own" in rewarded


class Counted(PhaseMemory):
    """Phases that take a GB each."""

    def begin(self) -> None:
        pass

    def end(self) -> int:
        return 10**9


class Setting:
    def planned(self) -> MemoryPlan:
        torch.rand(3)
        return PLANNED


@pytest.mark.parametrize("gpu", (True, False))
def test_a_gpus_first_step_is_counted_and_draws_are_those_without(monkeypatch, gpu):
    """On a CPU nothing is counted, planned or said."""
    memory, said = Counted(), []
    monkeypatch.setattr(memory_lines, "phase_memory", memory)
    monkeypatch.setattr(memory_lines, "on_gpu", lambda: gpu)
    monkeypatch.setattr(memory_lines, "setting_here", lambda *_: Setting())
    state = torch.get_rng_state()
    with memory_compared(step3(), None, resumed=False, say=said.append):
        assert memory.counting == gpu
        with memory.phase("train"):
            pass
    assert not memory.counting and torch.equal(torch.get_rng_state(), state)
    assert [line.partition("peak: ")[2] for line in said] == ["train 4.00 / 1.00"] * gpu
    with pytest.raises(ValueError), memory_compared(step3(), None, resumed=False, say=said.append):
        raise ValueError
    assert len(said) == gpu and not memory.counting


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
        ([], "no program in ''. Put `python -m training.runtime.dry_run` before a whole command"),
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
    assert dry_run._command() == "deepspeed p.py --stop 'a b'"
    monkeypatch.setattr(sys, "argv", ["training/step1_sft.py", "--dry_run", "--local_rank=0", "--seed", "1"])
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "16", "LOCAL_SIZE": "8"})
    assert dry_run._command() == "deepspeed --num_nodes 2 --num_gpus 8 training/step1_sft.py --seed 1"


def test_data_sets_that_are_not_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "copy").mkdir()
    names = ["Dahoas/rm-static", "owner/copy", "rows.jsonl", "./x", "local/jsonfile", "rm-static", "Dahoas/rm-static"]
    assert dry_run.unseen_data(names) == ["Dahoas/rm-static", "rm-static"]
