"""Errors before the group of ranks stands end those that wait, with one message: a rank that fails, one that cannot
import, mistakes in flags that all ranks share; and the host's name in a message, where a run has several.
"""

import ast
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

import training
from engine import distributed
from engine.errors import SharedError, UserError
from scripts.harness import free_port
from scripts.harness.programs import Tiny, command_line
from training import step3_rlhf
from training.config.step3 import RLHFFlags
from training.data.token_cache import Found, KnownRows, handed_over
from training.runtime import environment, import_errors, launch, nodes, ranks, watch
from training.runtime.processes import phase
from training.runtime.ranks import MeetingPoint, agreed, checked
from training.runtime.watch import JOINING, Watch

ERROR = ("error: on gpu2: rank 1 sees no GPU", 2)


@pytest.fixture
def two(monkeypatch) -> list[MeetingPoint]:
    """Two that are to meet, and look at each call."""
    monkeypatch.setattr(ranks, "LOOK_EVERY", 0.0)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [MeetingPoint({**place, "RANK": rank}) for rank in ("0", "1")]


@pytest.fixture
def beside():
    """Runs a function in a thread of its own."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


def heard(rank: MeetingPoint, seconds: float = 60.0) -> tuple[str, int] | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if failure := rank.failure():
            return failure
        time.sleep(0.05)
    return None


def passed_on(rank: MeetingPoint) -> tuple[str, int] | None:
    """By rank 0: what another one has said, which the others may then read, too."""
    failure = heard(rank)
    rank.let_others_hear()
    return failure


@pytest.mark.parametrize("text, told", [("5", None), ("[[", None), ('["ended well", 0]', ("ended well", 1))])
def test_what_no_rank_has_said_ends_nothing_with_code_0(two, text, told):
    zero = two[0]
    store = distributed.key_value_store("127.0.0.1", int(zero._environment["MASTER_PORT"]), serve=True)
    store.set(zero._failed, text)
    assert zero.failure() == told


def test_rank_0_hears_of_another_that_fails(two, beside, monkeypatch):
    zero, one = two
    served = distributed.key_value_store("127.0.0.1", int(zero._environment["MASTER_PORT"]), serve=True)  # the group's
    assert zero.failure() is None
    announced = beside(one.announce, *ERROR)
    assert heard(zero) == ERROR
    assert not announced.done()  # it waits for rank 0 to print
    monkeypatch.setattr(ranks, "LOOK_EVERY", 30.0)
    began = time.monotonic()
    zero.let_others_hear()
    assert time.monotonic() - began < 30.0  # both have heard
    assert announced.result() is True
    del served


def test_another_hears_of_rank_0_that_fails_though_nobody_serves(two, beside):
    zero, one = two
    announced = beside(zero.announce, "Traceback: broken", 1)
    assert heard(one) == ("Traceback: broken", 1)
    assert announced.result() is True


def test_of_two_that_fail_one_is_printed(two, beside):
    zero, one = two
    others = beside(one.announce, *ERROR)
    assert zero.announce("Traceback: broken", 1) is True
    assert others.result() is True


def test_what_failed_before_torchrun_started_the_ranks_anew_is_over(two, beside):
    served = distributed.key_value_store("127.0.0.1", int(two[0]._environment["MASTER_PORT"]), serve=True)  # torchrun's
    announced = beside(two[1].announce, *ERROR)
    assert heard(two[0]) == ERROR
    anew = MeetingPoint({**two[0]._environment, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert heard(anew, 1.0) is None
    two[0].let_others_hear()
    assert announced.result() is True
    del served


def test_where_nobody_is(two, monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE", 0.5)
    assert two[1].failure() is None
    assert two[1].announce(*ERROR) is False


def test_a_process_alone_meets_nobody(monkeypatch):
    monkeypatch.setattr(ranks, "LOOK_EVERY", 0.0)
    assert MeetingPoint({}).failure() is None
    assert MeetingPoint({}).announce(*ERROR) is False


@pytest.fixture
def told(monkeypatch) -> Callable:
    """What a watch says and prints of an error before its rank has joined: (announced, printed)."""
    monkeypatch.setattr(watch, "from_here", lambda text: f"on gpu2: {text}")

    def tell(main: bool, printed_by_rank_0: bool) -> tuple[list, list]:
        announced: list = []
        printed: list = []
        monkeypatch.setattr(distributed, "is_main", lambda: main)
        monkeypatch.setattr(watch, "print_line", printed.append)
        own = Watch(SimpleNamespace(), 30.0)
        own._meeting_point = SimpleNamespace(announce=lambda *words: announced.append(words) or printed_by_rank_0)
        own.tell("rank 1 sees no GPU", 2)
        return announced, printed

    return tell


@pytest.mark.parametrize("main, by_rank_0, printed", [(False, True, 0), (False, False, 1), (True, True, 1)])
def test_who_prints_it(main, by_rank_0, printed, told):
    assert told(main, by_rank_0) == ([ERROR], [ERROR[0]] * printed)


def test_a_rank_that_waits_ends_with_the_code_of_the_one_that_failed(monkeypatch, capfd):
    ended, calls = [], []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(distributed, "is_main", lambda: True)
    monkeypatch.setattr(watch, "leave_now", ended.append)
    own = Watch(SimpleNamespace(), 30.0)
    own._meeting_point = SimpleNamespace(failure=lambda: ERROR, let_others_hear=lambda: calls.append("heard"))
    own._look_for_ranks()
    assert ended == []  # it does not join yet
    with phase(JOINING):
        own._look_for_ranks()
    assert (ended, calls) == ([2], ["heard"])
    assert capfd.readouterr().err == ERROR[0] + "\n"


def test_a_store_that_never_answers_does_not_hold_up_the_watch(monkeypatch):
    ended, answer = [], Event()
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(watch, "SECONDS", 0.01)
    monkeypatch.setattr(watch, "end", lambda code, message: ended.append(code))
    own = Watch(SimpleNamespace(), 0.0)
    own._meeting_point = SimpleNamespace(failure=lambda: answer.wait(60.0) and None)
    with phase(JOINING):
        own._look_for_ranks()
    assert ended == [1] and own._look.is_alive()
    answer.set()


@pytest.fixture
def second_of_two_hosts(monkeypatch) -> dict[str, str]:
    """Has this process be rank 1; gives its environment."""
    monkeypatch.setattr(ranks, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(ranks, "PATIENCE", 1.0)
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


def test_the_rank_that_waits_is_told(second_of_two_hosts, beside, capfd, monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE", 60.0)
    served = distributed.key_value_store("127.0.0.1", int(second_of_two_hosts["MASTER_PORT"]), serve=True)
    hearing = beside(passed_on, MeetingPoint({**second_of_two_hosts, "RANK": "0"}))
    with pytest.raises(SystemExit) as ended:
        fail()
    message, code = hearing.result()
    assert message.startswith(EXPECTED) and __file__ in message and code == ended.value.code == 2
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


def test_a_file_that_one_host_lacks_is_told_where_the_others_wait(tmp_path, beside, monkeypatch, capfd):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu02")
    monkeypatch.setattr(ranks, "LOOK_EVERY", 0.0)
    served = distributed.key_value_store("127.0.0.1", int(os.environ["MASTER_PORT"]), serve=True)
    first, missing = MeetingPoint({**os.environ, "RANK": "0"}), tmp_path / "none.yaml"
    flags = Tiny(tmp_path).flags(3, output_dir=tmp_path / "out", config=missing)
    hearing = beside(passed_on, first)
    assert launch.run(step3_rlhf.main, RLHFFlags, "", command_line(flags)) == 2
    message, code = hearing.result()
    assert (message.startswith("error: on gpu02: "), str(missing) in message, code) == (True, True, 2), message
    assert "error" not in capfd.readouterr().err  # rank 0 prints it
    del served


def test_a_rank_that_lets_the_first_print_is_not_taken_for_one_that_was_asked_to_end(tmp_path, monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    ended, pause = [], time.sleep

    def refuse(patience):
        raise SharedError("the nodes of this run do not fit together: gpu02: has torch 2.12.1, the others 2.13.0.")

    def launcher_ends_this(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        pause(1.0)

    monkeypatch.setattr(nodes, "roll_call", refuse)
    monkeypatch.setattr(watch, "end", lambda code, message: ended.append(code))
    monkeypatch.setattr(environment, "time", type("Clock", (), {"sleep": staticmethod(launcher_ends_this)}))
    words = command_line(Tiny(tmp_path).flags(3, output_dir=tmp_path / "out"))
    assert launch.run(step3_rlhf.main, RLHFFlags, "", words) == 2
    assert ended == []


@pytest.fixture
def launched(monkeypatch) -> Callable:
    """A function that has this process launched so, on gpu1; with `others`, the (message, host) of the other ranks."""

    def launch(others=(), **environment):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(socket, "gethostname", lambda: "gpu1")
        said = chain([list(others)], repeat([(None, host) for _, host in others]))  # later they have nothing to say
        monkeypatch.setattr(distributed, "all_gather_objects", lambda own: [own, *next(said)])

    return launch


def missing():
    raise UserError("there is no folder X")


@pytest.mark.parametrize(
    "size, told", [("1", r"^on gpu1: there is no folder X$"), ("2", r"^there is no folder X$")], ids=["two", "one"]
)
def test_what_rank_0_alone_looks_at(size, told, launched):
    launched(RANK="0", WORLD_SIZE="2", LOCAL_SIZE=size)
    with pytest.raises(SharedError, match=told):
        checked(missing)


@pytest.mark.parametrize(
    "load, others, told",
    [
        (missing, [("there is no folder X", "gpu1")], "^there is no folder X$"),
        (missing, [(None, "gpu2")], "^on gpu1: there is no folder X$"),
        (lambda: 1, [("no disk", "gpu2"), (None, "gpu3"), ("no disk", "gpu4")], "^on gpu2, gpu4: no disk$"),
        (missing, [("there is no folder X", "gpu2")], "^there is no folder X$"),  # of no host in particular
        (missing, [("no disk", "gpu2")], "^on gpu1: there is no folder X$"),
    ],
)
def test_what_each_rank_looks_at(load, others, told, launched):
    launched(others)
    with pytest.raises(SharedError, match=told):
        agreed(load)


def test_what_none_finds_wrong(launched):
    launched([(None, "gpu2")])
    assert agreed(lambda: 1) == 1


def test_a_rank_takes_over_what_the_first_one_of_its_own_node_has_read(launched, monkeypatch):
    launched([], LOCAL_RANK="1")
    here, there = (Found([(KnownRows(rows, host),)]) for rows, host in ((3, "gpu1"), (5, "gpu2")))
    others = iter([[(None, "gpu1"), (None, "gpu2")], [(here, "gpu1"), (there, "gpu2")], [(None, "gpu1")]])
    monkeypatch.setattr(distributed, "all_gather_objects", lambda own: [own, *next(others)])
    assert agreed(handed_over(missing)) == (KnownRows(3, "gpu1"),)
