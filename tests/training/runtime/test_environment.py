"""What the programs make of the environment that they are started in, by srun among others."""

import io
import os
import shutil
import socket
import sysconfig

import pytest
import torch

from engine import distributed
from engine.errors import UserError
from scripts.harness import free_port
from training.runtime.environment import (
    AGENTS_STORE,
    Unfailing,
    check_port,
    first_host,
    of_srun,
    on_several_hosts,
    own_programs_first,
)


def test_programs_of_this_python_are_found_without_its_activation(tmp_path, monkeypatch):
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    own_programs_first()
    assert shutil.which("ninja") == str(tmp_path / "ninja")
    assert os.environ["PATH"] == f"{tmp_path}:/usr/bin:/bin"
    own_programs_first()
    assert os.environ["PATH"] == f"{tmp_path}:/usr/bin:/bin"


@pytest.fixture
def port(monkeypatch) -> int:
    """Where this process, a run's rank 0, is to serve the others; tests before may have left it a group that stands."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.delenv(AGENTS_STORE, raising=False)
    found = free_port()
    monkeypatch.setenv("MASTER_PORT", str(found))
    return found


def test_a_port_that_another_run_meets_at_is_refused_on_rank_0_alone(port, monkeypatch):
    check_port()
    served = distributed.key_value_store("127.0.0.1", port, serve=True)
    with pytest.raises(UserError, match=rf"port {port} .* is in use.*--master_port"):
        check_port()
    monkeypatch.setenv("RANK", "1")
    check_port()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(AGENTS_STORE, "True")  # torchrun serves it
    check_port()
    monkeypatch.delenv(AGENTS_STORE)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # it is this process's own store
    check_port()
    del served


def test_a_port_that_a_run_has_just_left_is_free(port):
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        client.close()
    check_port()


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_process_without_a_port_asks_for_none(value, port, monkeypatch):
    if value is None:
        monkeypatch.delenv("MASTER_PORT")
    else:
        monkeypatch.setenv("MASTER_PORT", value)
    check_port()


@pytest.mark.parametrize(
    "environment, several",
    [
        ({}, False),
        ({"RANK": "3", "WORLD_SIZE": "8"}, False),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_SIZE": "8"}, False),
        ({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, True),  # deepspeed's, and what srun's tasks are given
        ({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),  # torchrun's
        ({"WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, False),  # a dry run's
    ],
)
def test_a_process_knows_whether_there_are_other_hosts(environment, several):
    assert on_several_hosts(environment) == several


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
    assert of_srun(STEP) == {
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
    assert of_srun(environment) == {}


def test_what_is_given_stays():
    given = {"MASTER_PORT": "1234", "MASTER_ADDR": "fast-gpu07", "LOCAL_RANK": "0"}
    assert of_srun(STEP | given) == {"RANK": "9", "WORLD_SIZE": "10", "LOCAL_SIZE": "2"}


def test_the_step_is_asked_before_the_job():
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "big[1-2]"}
    told = of_srun({**STEP, **step, "SLURM_PROCID": "3", "SLURM_NODEID": "1"})
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
        of_srun(environment)


def test_printed_text_has_no_control_characters_and_a_progress_bar_begins_its_line_again():
    stream = io.StringIO()
    printed = Unfailing(stream)
    print("x\x1b[2J\u202e\x9b\r\udcff.json", file=printed)
    printed.write("\r10%\x1b")
    assert stream.getvalue() == "x\\x1b[2J\\u202e\\x9b\\r\\udcff.json\n\r10%\\x1b"
