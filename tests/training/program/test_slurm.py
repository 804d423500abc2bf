"""Ranks that srun has started, from what SLURM sets."""

import pytest

from engine.errors import UserError
from training.program.slurm import as_launched, first_host, hosts_by_rank

STEP = {  # srun --nodes 3 --ntasks 10: tasks 0 to 3, 4 to 7, 8 and 9; this is the last
    "SLURM_JOB_ID": "4000123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "10",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NODELIST": "gpu[07-08],big1",
    "SLURM_TASKS_PER_NODE": "4(x2),2",
}


def without(*names):
    return {name: value for name, value in STEP.items() if name not in names}


def test_a_task_is_a_rank():
    assert as_launched(STEP) == {
        "RANK": "9",
        "WORLD_SIZE": "10",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "24123",  # 4,000,123 = 333 * 12,000 + 4,123
    }


@pytest.mark.parametrize(
    "environment",
    [
        {},
        without("SLURM_STEP_ID"),  # the batch script itself
        {**STEP, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {**STEP, "RANK": "3", "WORLD_SIZE": "16"},  # torchrun, once a task
    ],
)
def test_what_is_none(environment):
    assert as_launched(environment) == {}


def test_what_is_given_stays():
    given = {"MASTER_PORT": "1234", "MASTER_ADDR": "fast-gpu07", "LOCAL_RANK": "0"}
    assert as_launched(STEP | given) == {"RANK": "9", "WORLD_SIZE": "10", "LOCAL_SIZE": "2"}


def test_the_step_is_asked_before_the_job():
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "big[1-2]"}
    told = as_launched({**STEP, **step, "SLURM_PROCID": "3", "SLURM_NODEID": "1"})
    assert (told["WORLD_SIZE"], told["LOCAL_SIZE"], told["MASTER_ADDR"]) == ("4", "2", "big1")


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu07", "gpu07"),
        ("gpu[007-009,012],login1", "gpu007"),
        ("gpu[3,5-9]-ib", "gpu3-ib"),
        ("login1,gpu[1-2]", "login1"),
        ("rack[02-03]n[1-8]", "rack02n1"),
    ],
)
def test_the_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "environment, told",
    [
        (without("SLURM_LOCALID"), "no SLURM_LOCALID. Pass on"),
        (without("SLURM_JOB_ID"), "no SLURM_JOB_ID. Pass on"),
        (without("SLURM_NODELIST"), "no SLURM_STEP_NODELIST or SLURM_NODELIST or SLURM_JOB_NODELIST"),
        ({**STEP, "SLURM_PROCID": "x"}, "SLURM_PROCID is 'x', no whole number"),
        ({**STEP, "SLURM_TASKS_PER_NODE": "many"}, "'many'"),
        ({**STEP, "SLURM_NODEID": "3"}, "SLURM_NODEID is 3, but SLURM names tasks of 3 nodes"),
    ],
)
def test_what_cannot_be_is_refused(environment, told):
    with pytest.raises(UserError, match=told.replace("(", r"\(")):
        as_launched(environment)


def test_the_node_of_each_task_is_told_where_they_fill_one_after_the_other():
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "gpu[07-08,12],big-1-ib"}
    tasks = {**step, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)"}
    assert hosts_by_rank(tasks) == {0: "gpu07", 1: "gpu07", 2: "gpu08", 3: "gpu08", 4: "gpu12", 5: "big-1-ib"}
    assert hosts_by_rank({**tasks, "SLURM_DISTRIBUTION": "cyclic"}) == {}
    assert hosts_by_rank(step) == {}
    assert hosts_by_rank({"SLURM_STEP_NODELIST": "gpu07"}) == {}
