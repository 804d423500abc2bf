"""An error before a program begins: told to all hosts with one message, or by a stack trace on one host."""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine import distributed
from tests.ports import free_port
from training.program import import_errors, joining
from training.program.joining import MeetingPoint


@pytest.fixture
def second_of_two_hosts(monkeypatch) -> dict[str, str]:
    """Has this process be rank 1; gives its environment."""
    monkeypatch.setattr(joining, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(joining, "PATIENCE", 1.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu2")
    monkeypatch.setattr(os, "_exit", sys.exit)
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    told["MASTER_PORT"] = str(free_port())
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return told


def fail() -> None:
    """As an import of what is not there does."""
    try:
        import package_that_is_not_there  # noqa: F401
    except ImportError as error:
        import_errors.tell_all_hosts(type(error), error, error.__traceback__)


EXPECTED = (
    "error: on gpu2: the program cannot begin: ModuleNotFoundError: No module named 'package_that_is_not_there' ("
)


def test_the_rank_that_waits_is_told(second_of_two_hosts, capfd, monkeypatch):
    monkeypatch.setattr(joining, "PATIENCE", 60.0)
    served = distributed.key_value_store("127.0.0.1", int(second_of_two_hosts["MASTER_PORT"]), serve=True)
    first = MeetingPoint({**second_of_two_hosts, "RANK": "0"})
    with ThreadPoolExecutor() as pool:
        failing = pool.submit(fail)
        while (failure := first.failure()) is None:
            pass
        first.let_others_hear()
        with pytest.raises(SystemExit) as ended:
            failing.result()
    assert failure[0].startswith(EXPECTED) and __file__ in failure[0] and failure[1] == ended.value.code == 2
    assert capfd.readouterr().err == ""  # rank 0 prints it
    del served


def test_where_rank_0_is_not_reached_this_one_prints(second_of_two_hosts, capfd):
    with pytest.raises(SystemExit):
        fail()
    assert capfd.readouterr().err.startswith(EXPECTED)


def test_a_task_of_slurm_knows_its_rank(second_of_two_hosts, capfd, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    step = {"STEP_ID": "0", "PROCID": "1", "NTASKS": "2", "LOCALID": "0", "NODEID": "1", "TASKS_PER_NODE": "1(x2)"}
    for name, value in {**step, "NODELIST": "gpu[1-2]", "JOB_ID": "7"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(SystemExit):
        fail()
    assert capfd.readouterr().err.startswith(EXPECTED)


def test_on_one_host_python_prints_its_trace(second_of_two_hosts, capfd, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    fail()
    assert "Traceback" in capfd.readouterr().err


def test_the_programs_have_it_called():
    from training import step3_rlhf  # noqa: F401

    assert sys.excepthook is import_errors.tell_all_hosts
