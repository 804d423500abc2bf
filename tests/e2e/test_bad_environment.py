"""What an environment that is no launcher's gets: one message that names the variable, exit code 2."""

import os
from unittest import mock

import pytest

from scripts.harness.programs import assert_one_message, run_here


@pytest.mark.parametrize(
    "found, told",
    [
        ({"RANK": "abc"}, "RANK is 'abc', no whole number"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT is '-1', no whole number"),
        ({"WORLD_SIZE": "0"}, "RANK is 0 of WORLD_SIZE 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 of WORLD_SIZE 2"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "0", "MASTER_ADDR": "a"}, "WORLD_SIZE is 2, but it has no MASTER_PORT, w"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "9", "MASTER_ADDR": ""}, "WORLD_SIZE is 2, but it has no MASTER_ADDR, w"),
    ],
)
def test_an_environment_that_cannot_be_a_launchers(tiny, tmp_path, capfd, monkeypatch, found, told):
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert_one_message(run_here(1, tiny.flags(1, output_dir=tmp_path / "out"), capfd), [f"the environment's {told}"])


def test_a_task_of_srun_that_is_told_too_little(tiny, tmp_path, capfd):
    """What it is told when that suffices: tests/training/runtime/test_environment.py."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    own = {name: value for name, value in os.environ.items() if name not in launched and "SLURM" not in name}
    task = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    with mock.patch.dict(os.environ, {**own, **task, "SLURM_TASKS_PER_NODE": "2"}, clear=True):
        result = run_here(1, tiny.flags(1, output_dir=tmp_path / "out"), capfd)
    assert_one_message(
        result, ["srun has started this process", "no SLURM_STEP_NODELIST or SLURM_NODELIST", "MASTER_A"]
    )
