"""The run record: complete, kept over a resume, never in the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import UserError
from training.reporting import run_record
from training.reporting.run_record import command_line, git_state, read_run_record, write_run_record

FLAGS = {"output_dir": "out", "kl_coef": 0.1, "data_path": Path("prompts.jsonl"), "stop": ["\n"]}


def _write(folder, **changes):
    write_run_record(
        folder,
        **{
            "flags": FLAGS,
            "dialect": {"kl_coef": 0.1, "betas": (0.9, 0.95)},
            "ds_configs": {"actor": {"zero_optimization": {"stage": 3}}},
            **changes,
        },
    )


def test_a_record_holds_what_is_needed_to_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["training/step3_rlhf.py", "--local_rank=0", "--stop", "a b", "--x=http://a/b?key=S"]
    )
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    _write(tmp_path / "new")
    (start,) = json.loads((tmp_path / "new" / "run.json").read_text())["starts"]
    assert start["flags"] == {"output_dir": "out", "kl_coef": 0.1, "data_path": "prompts.jsonl", "stop": ["\n"]}
    assert start["dialect"] == {"kl_coef": 0.1, "betas": [0.9, 0.95]}
    assert start["deepspeed"] == {"actor": {"zero_optimization": {"stage": 3}}}
    assert start["command"] == "python training/step3_rlhf.py --stop 'a b' --x=http://a/b"
    assert start["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(start["versions"]) == {"python", *run_record.PACKAGES} and start["versions"]["torch"].startswith("2.")
    assert start["machine"]["world_size"] == 1 and start["machine"]["accelerator"] and start["machine"]["host"]
    assert start["started"][4] == "-" and start["started"][10] == "T"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]


def test_a_resumed_run_keeps_the_earlier_starts_and_a_new_one_does_not(tmp_path):
    for kl_coef, resumed in ((0.1, False), (0.2, True), (0.3, True)):
        _write(tmp_path, flags={"kl_coef": kl_coef}, resumed=resumed)
    assert [start["flags"]["kl_coef"] for start in read_run_record(tmp_path / "run.json")] == [0.1, 0.2, 0.3]
    _write(tmp_path, flags={"kl_coef": 0.4})
    assert [start["flags"]["kl_coef"] for start in read_run_record(tmp_path / "run.json")] == [0.4]


def test_a_run_from_before_there_were_records_is_resumed(tmp_path):
    _write(tmp_path, resumed=True)
    assert len(read_run_record(tmp_path / "run.json")) == 1


def test_a_kill_while_writing_leaves_the_earlier_record(tmp_path, monkeypatch):
    _write(tmp_path)
    before = (tmp_path / "run.json").read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_record.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        _write(tmp_path, resumed=True)
    assert (tmp_path / "run.json").read_text() == before


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_file_that_is_no_record_is_named_and_left(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match="run.json: no record of a run"):
        _write(tmp_path, resumed=True)
    assert (tmp_path / "run.json").read_text() == text


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record.distributed, "is_main", lambda: False)
    _write(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "environment, launcher",
    [
        ({"WORLD_SIZE": "1", "RANK": "0"}, "python"),
        ({"WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, "deepspeed --num_nodes 2 --num_gpus 8"),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"},
            "torchrun --nnodes 2 --nproc_per_node 4",
        ),
        (
            {"WORLD_SIZE": "8", "LOCAL_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5"},
            "srun --ntasks 8 --ntasks-per-node 4 python",
        ),
        (
            {"WORLD_SIZE": "8", "LOCAL_SIZE": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "CROSS_RANK": "0"},
            "deepspeed --num_nodes 1 --num_gpus 8",
        ),
    ],
)
def test_the_command_names_the_launcher_and_its_sizes(environment, launcher):
    argv = ["training/step1_sft.py", "--local_rank=3", "--data_path", "my data.jsonl"]
    assert command_line(argv, environment) == f"{launcher} training/step1_sft.py --data_path 'my data.jsonl'"


def _git(folder, *arguments):
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=folder, check=True, capture_output=True
    )


def test_git_state_of_a_checkout(tmp_path, monkeypatch):
    assert git_state(tmp_path) is None  # no checkout
    _git(tmp_path, "init")
    assert git_state(tmp_path) is None  # one without this code
    (tmp_path / "code.py").write_text("a = 1\n")
    _git(tmp_path, "add", ".")
    assert git_state(tmp_path) is None  # no commit yet
    _git(tmp_path, "commit", "-m", "first")
    commit = (tmp_path / ".git" / "refs" / "heads").iterdir().__next__().read_text().strip()
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "notes.txt").write_text("untracked files change no run\n")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "code.py").write_text("a = 2\n")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None  # no git
