"""The launchers on several nodes, and as tasks of SLURM's: which they take, and what they ask for."""

import shutil
import subprocess

import pytest

from scripts.harness import ROOT
from tests.e2e.launching import flag_of, launched, stand_in, words_of, write_hostfile


@pytest.mark.parametrize("nodes, options", [(1, "-o ServerAliveInterval=10 -o ServerAliveCountMax=3"), (0, "")])
def test_ssh_gives_up_a_node_that_is_cut_off(nodes, options, tmp_path):
    stand_in(tmp_path / "deepspeed", '"$PDSH_SSH_ARGS_APPEND"')
    hosts = write_hostfile(tmp_path / "hosts", nodes) if nodes else ""
    assert words_of(tmp_path, "opt_1.3b", "3", HOSTFILE=hosts) == [options]


def test_nodes_that_are_not_named_are_asked_for(stand_ins, tmp_path):
    """deepspeed would end with a stack trace, or go on with fewer nodes, or on this machine alone."""
    missing = launched(stand_ins, "llama2_70b", "3")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("error: HARDWARE=64xa100-80g is 8 nodes: name them, HOSTFILE=hosts")
    few = launched(stand_ins, "llama2_70b", "3", "--dry_run", HOSTFILE=write_hostfile(tmp_path / "hosts", 4))
    assert (few.returncode, few.stdout) == (2, "")
    assert "names 4 nodes, and 8 are asked for (HARDWARE=64xa100-80g)" in few.stderr
    nowhere = launched(stand_ins, "opt_1.3b", "3", HOSTFILE="nowhere")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert "error: HOSTFILE=nowhere: there is no such file." in nowhere.stderr


def test_pdsh_is_asked_for(stand_ins, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "grep"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    stand_in(tmp_path / "bin" / "deepspeed", '"$@"')
    hosts = {nodes: write_hostfile(tmp_path / f"hosts{nodes}", nodes) for nodes in (1, 2)}
    assert launched(tmp_path / "bin", "opt_1.3b", "3", path="", HOSTFILE=hosts[1]).returncode == 0
    without = launched(tmp_path / "bin", "opt_1.3b", "3", path="", HOSTFILE=hosts[2])
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr.startswith("error: there is no pdsh here")
    assert launched(stand_ins, "opt_1.3b", "3", HOSTFILE=hosts[2]).returncode == 0


def test_a_task_of_srun_is_a_rank(stand_ins):
    words = words_of(stand_ins, "llama2_70b", "3", "--resume", "auto", LAUNCHER="srun")
    assert words[:3] == ["python", "-u", str(ROOT / "training" / "step3_rlhf.py")]
    assert flag_of(words, "resume") == "auto" and flag_of(words, "actor_zero_stage") == "3"


@pytest.mark.parametrize(
    "given, started",
    [
        (["training/step1_sft.py", "--seed", "1"], ["python", "-u", "training/step1_sft.py", "--resume", "auto"]),
        (["scripts/opt_13b.sh", "3", "--seed", "1"], ["env", "LAUNCHER=srun", "scripts/opt_13b.sh", "3"]),
    ],
)
def test_a_slurm_job_starts_a_step_or_a_launcher(given, started, tmp_path):
    stand_in(tmp_path / "srun", '"$SRUN_CPUS_PER_TASK" "$@"')
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm.sh"), *given],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "6"},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    cores, *words = ended.stdout.split("\0")[:-1]
    command = [word for word in words if word not in ("--kill-on-bad-exit=1", "--wait=60")]
    assert cores == "6" and command[: len(started)] == started
    assert command[-4:] == ["--resume", "auto", "--seed", "1"]
