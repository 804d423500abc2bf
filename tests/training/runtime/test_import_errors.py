"""An error before a program begins: told to all hosts with one message, or by a stack trace on one host."""

import ast
import os
import runpy
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import training
from engine import distributed
from scripts.harness import free_port
from training.runtime import agreement, import_errors
from training.runtime.agreement import MeetingPoint


@pytest.fixture
def second_of_two_hosts(monkeypatch) -> dict[str, str]:
    """Has this process be rank 1; gives its environment."""
    monkeypatch.setattr(agreement, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(agreement, "PATIENCE", 1.0)
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
    monkeypatch.setattr(agreement, "PATIENCE", 60.0)
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


def test_on_one_host_what_stood_there_is_called(second_of_two_hosts, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    called = []
    monkeypatch.setattr(import_errors, "_before", lambda kind, error, trace: called.append(kind))
    fail()
    assert called == [ModuleNotFoundError]


@pytest.mark.parametrize(
    "rank, said", [("0", "Ctrl-C (SIGINT): ended before the run began; nothing is lost.\n"), ("1", "")]
)
def test_a_ctrl_c_before_the_run_leaves_no_trace(rank, said):
    program = "import training.runtime.import_errors; raise KeyboardInterrupt"
    environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600
    )
    assert (ended.returncode, ended.stderr) == (75, said)


def test_importing_it_has_it_called(monkeypatch):
    def before(*_): ...

    monkeypatch.setattr(sys, "excepthook", before)
    anew = runpy.run_path(import_errors.__file__)
    assert sys.excepthook is anew["tell_all_hosts"] and anew["_before"] is before


@pytest.mark.parametrize("step", ["step1_sft", "step2_reward", "step3_rlhf"])
def test_the_programs_import_it_before_anything_but_torch_and_numpy(step):
    source = Path(training.__file__).with_name(f"{step}.py").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.names[0].name if isinstance(node, ast.Import) else node.module for node in imports]
    before = {name.partition(".")[0] for name in names[: names.index("training.runtime.import_errors")]}
    assert before <= {"torch", "numpy", *sys.stdlib_module_names}, before
