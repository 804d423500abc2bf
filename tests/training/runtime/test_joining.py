"""A rank that fails before the process group stands ends those that wait for it, with one message."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from engine import distributed
from scripts.harness import free_port
from training.runtime import agreement, watch
from training.runtime.agreement import MeetingPoint
from training.runtime.processes import phase
from training.runtime.watch import JOINING, Watch

ERROR = ("error: on gpu2: rank 1 sees no GPU", 2)


@pytest.fixture
def ranks(monkeypatch) -> list[MeetingPoint]:
    """Two that are to meet, and look at each call."""
    monkeypatch.setattr(agreement, "LOOK_EVERY", 0.0)
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


@pytest.mark.parametrize("text, told", [("5", None), ("[[", None), ('["ended well", 0]', ("ended well", 1))])
def test_what_no_rank_has_said_ends_nothing_with_code_0(ranks, text, told):
    zero = ranks[0]
    store = distributed.key_value_store("127.0.0.1", int(zero._environment["MASTER_PORT"]), serve=True)
    store.set(zero._failed, text)
    assert zero.failure() == told


def test_rank_0_hears_of_another_that_fails(ranks, beside, monkeypatch):
    zero, one = ranks
    served = distributed.key_value_store("127.0.0.1", int(zero._environment["MASTER_PORT"]), serve=True)  # the group's
    assert zero.failure() is None
    announced = beside(one.announce, *ERROR)
    assert heard(zero) == ERROR
    assert not announced.done()  # it waits for rank 0 to print
    monkeypatch.setattr(agreement, "LOOK_EVERY", 30.0)
    began = time.monotonic()
    zero.let_others_hear()
    assert time.monotonic() - began < 30.0  # both have heard
    assert announced.result() is True
    del served


def test_another_hears_of_rank_0_that_fails_though_nobody_serves(ranks, beside):
    zero, one = ranks
    announced = beside(zero.announce, "Traceback: broken", 1)
    assert heard(one) == ("Traceback: broken", 1)
    assert announced.result() is True


def test_of_two_that_fail_one_is_printed(ranks, beside):
    zero, one = ranks
    others = beside(one.announce, *ERROR)
    assert zero.announce("Traceback: broken", 1) is True
    assert others.result() is True


def test_what_failed_before_torchrun_started_the_ranks_anew_is_over(ranks, beside):
    served = distributed.key_value_store(
        "127.0.0.1", int(ranks[0]._environment["MASTER_PORT"]), serve=True
    )  # torchrun's
    announced = beside(ranks[1].announce, *ERROR)
    assert heard(ranks[0]) == ERROR
    anew = MeetingPoint({**ranks[0]._environment, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert heard(anew, 1.0) is None
    ranks[0].let_others_hear()
    assert announced.result() is True
    del served


def test_where_nobody_is(ranks, monkeypatch):
    monkeypatch.setattr(agreement, "PATIENCE", 0.5)
    assert ranks[1].failure() is None
    assert ranks[1].announce(*ERROR) is False


def test_a_process_alone_meets_nobody(monkeypatch):
    monkeypatch.setattr(agreement, "LOOK_EVERY", 0.0)
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
