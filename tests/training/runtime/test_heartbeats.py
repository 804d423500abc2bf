"""What is found out about ranks from what they say, and from what they do not say; the end of a process has the run's
exit code, whatever libraries do while they are taken down.
"""

import contextlib
import hmac
import os
import socket
import struct
import subprocess
import sys
import time

import pytest

from engine import trace
from training.runtime import heartbeats, watch
from training.runtime.heartbeats import Connection, Monitor, Reporter, Verdict
from training.runtime.processes import Place
from training.runtime.stopping import Reason, StopRequest
from training.runtime.watch import Watch


@pytest.fixture
def two_ranks(monkeypatch):
    """The heartbeats of two ranks that are both this process, with rounds of 30 ms: 40 of them are 1.2 s."""
    monkeypatch.setattr(heartbeats, "ROUND", 0.03)
    monkeypatch.setattr(heartbeats, "LINE", 20)
    monkeypatch.setattr(heartbeats, "SILENT", 40)
    monitor = Monitor(2, timeout_minutes=30)
    monitor.start()
    reporters = [Reporter(rank, monitor.address, monitor.key) for rank in (0, 1)]
    yield monitor, reporters
    monitor.close()
    for reporter in reporters:
        reporter.close()


def verdict(speaking: list[Reporter], seconds: float = 30.0) -> Verdict | None:
    """What the first of them hears while all of them speak."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and speaking[0].verdict is None:
        for reporter in speaking:
            reporter.look()
        time.sleep(0.01)
    return speaking[0].verdict


def test_ranks_that_speak_and_leave_are_no_matter(two_ranks):
    _, reporters = two_ranks
    assert verdict(reporters, seconds=1.8) is None
    reporters[1].say(left=0)
    reporters[1].close()
    assert verdict(reporters[:1], seconds=1.8) is None


def test_one_that_has_left_does_not_mind_the_end_of_rank_0(two_ranks):
    monitor, reporters = two_ranks
    reporters[1].say(left=0)
    monitor.close()
    assert verdict(reporters[1:], seconds=1) is None


def test_a_connection_that_ends_without_a_word_is_a_death(two_ranks):
    _, reporters = two_ranks
    verdict(reporters, seconds=0.5)
    reporters[1].close()
    found = verdict(reporters[:1])
    assert found.code == 1
    assert f"rank 1 (process {os.getpid()} on " in found.message and "has died in phase outside of" in found.message


def test_the_first_rank_with_an_error_is_quoted(two_ranks):
    _, reporters = two_ranks
    reporters[1].say(trouble="Traceback: broken")
    assert verdict(reporters).message == "rank 1: Traceback: broken"


@pytest.mark.parametrize(
    "others, first, message",
    [
        ({}, {"trouble": "Traceback: broken"}, "rank 1 on gpu2: Traceback: broken"),
        ({}, {"trouble": "no folder X", "code": 2}, "error: on gpu2: no folder X"),
        ({"trouble": "stopped: NaN"}, {"trouble": "stopped: NaN"}, "stopped: NaN"),
        ({"trouble": "no key", "code": 2}, {"trouble": "no key", "code": 2}, "error: no key"),
    ],
)
def test_the_host_of_an_error_is_named_where_others_have_not_met_it(two_ranks, others, first, message):
    _, reporters = two_ranks
    reporters[0].say(host="gpu1", **others)
    reporters[1].say(host="gpu2", **first)
    found = verdict(reporters)
    assert (found.message, found.code) == (message, first.get("code", 1))


def test_silence_of_a_process_that_runs_is_no_end(two_ranks):
    """Its state by the kernel is looked up by rank 0, which stands on the same machine: a long monitor, not a stop."""
    monitor, reporters = two_ranks
    verdict(reporters, seconds=0.5)
    assert verdict(reporters[:1], seconds=2) is None
    assert monitor.ranks[1].quiet > heartbeats.SILENT and monitor.ranks[1].state in ("R", "S")


def test_silence_of_a_stopped_process_is_an_end(two_ranks, monkeypatch):
    _, reporters = two_ranks
    verdict(reporters, seconds=0.5)
    monkeypatch.setattr("training.runtime.heartbeats.state_of", lambda pid: "T")
    found = verdict(reporters[:1])
    assert "rank 1" in found.message and "is stopped (a signal stopped its process)" in found.message
    assert found.stuck == [[reporters[1].machine, os.getpid()]]


def test_ranks_that_all_stand_still_are_ended_and_one_is_named_as_one_of_them(two_ranks, monkeypatch):
    monitor, reporters = two_ranks
    monitor.timeout = 30
    monkeypatch.setattr("training.runtime.processes.place.phase", "generate")
    trace.moved("vLLM takes weights")
    found = verdict(reporters)
    assert "no rank has moved for" in found.message and "--timeout_minutes" in found.message
    assert "rank 0 (process" in found.message and "is in phase generate" in found.message
    assert "; last begun: vLLM takes weights), like 1 more. The run ends" in found.message
    assert found.stacks == [0]


def test_ranks_that_stand_still_in_one_phase_are_named_by_what_they_began_last(two_ranks):
    monitor, reporters = two_ranks
    monitor.timeout = 30
    reporters[0].say(phase="generate", last="gather of weights")
    reporters[1].say(phase="generate", last="vLLM takes weights")
    found = verdict(reporters)
    first, second = found.message.split(", rank 1 ")
    assert "rank 0 " in first and "last begun: gather of weights)" in first
    assert "is in phase generate" in second and "last begun: vLLM takes weights)" in second
    assert found.stacks == [0, 1]


@pytest.mark.parametrize("stuck", (0, 1))
def test_of_two_ranks_the_one_that_is_longer_in_its_phase_is_waited_for(two_ranks, stuck):
    monitor, reporters = two_ranks
    monitor.timeout = 30
    reporters[stuck].say(phase="generate", since=1000.0, last="vLLM draws a token")
    reporters[1 - stuck].say(phase="make_experience", since=1001.0, last="policy forward")
    found = verdict(reporters)
    assert f": rank {stuck} " in found.message and "is in phase generate" in found.message
    assert "make_experience" not in found.message and found.stacks == [stuck]


STRANGE = {
    "a number": b"5\n",
    "no object": b"[]\n",
    "deep": b"[" * 100_000 + b"\n",
    "no JSON": bytes(range(256)) + b"\n",
    "another key's proof": hmac.digest(b"another key", b"caller 0 {}", "sha256").hex().encode() + b" {}\n",
    "without end": b"a" * (heartbeats.LONGEST + (1 << 20)),
    "nothing": b"",
}


def test_strangers_are_told_nothing_and_change_nothing(monkeypatch):
    monkeypatch.setattr(heartbeats, "PROVE", 1.0)
    monkeypatch.setattr(heartbeats, "ROUND", 0.1)
    monitor = Monitor(2, timeout_minutes=30)
    monitor.start()
    strangers = {name: socket.create_connection(monitor.address, timeout=30) for name in STRANGE}
    crowd = [socket.create_connection(monitor.address, timeout=30) for _ in range(3 * heartbeats.STRANGERS)]
    with contextlib.suppress(OSError):
        for name, words in STRANGE.items():
            strangers[name].sendall(words)
    for name, stranger in strangers.items():
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b"", name  # after a second it is dropped, and has heard nothing
    reporters = [Reporter(rank, monitor.address, monitor.key) for rank in (0, 1)]
    assert verdict(reporters, seconds=0.5) is None and all(rank.beat for rank in monitor.ranks)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(monitor.address, timeout=30)
    reporters[1].say(trouble="\x1b[31mbroken")
    assert verdict(reporters).message == "rank 1: \x1b[31mbroken"
    for one in [monitor, *reporters, *strangers.values(), *crowd]:
        one.close()


def test_a_rank_has_one_connection_and_another_one_takes_nobodys_place(monkeypatch):
    monkeypatch.setattr(heartbeats, "ROUND", 0.1)
    monitor = Monitor(3, timeout_minutes=30)
    monitor.start()
    reporters = [Reporter(rank, monitor.address, monitor.key) for rank in (0, 1)]
    assert verdict(reporters, seconds=0.5) is None
    again = Reporter(1, monitor.address, monitor.key)  # as one who says again what rank 1 has said
    assert verdict(reporters, seconds=0.5) is None and len(monitor._known) == 2 and not monitor._strangers
    reporters.append(Reporter(2, monitor.address, monitor.key))
    assert verdict(reporters, seconds=0.5) is None and all(rank.beat for rank in monitor.ranks)
    for one in [monitor, again, *reporters]:
        one.close()


def test_where_rank_0_was_is_known_though_nobody_listened_before_it_died(two_ranks, monkeypatch, capfd):
    monitor, reporters = two_ranks
    verdict(reporters, seconds=0.5)
    monkeypatch.setattr("training.runtime.heartbeats.place", Place("train", 3))
    monitor.pass_on(reporters[0].say())
    monitor.close()
    time.sleep(0.1)
    for _ in range(3):  # the first that is said to one who has gone is no error yet
        reporters[1].say()
        time.sleep(0.1)
    assert verdict(reporters[1:]).code == 1
    assert "has died in phase train of step 3" in capfd.readouterr().err


@pytest.mark.parametrize(
    "place, found",
    [
        ({"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "no.such.host"}, "127.0.0.1"),
        ({"WORLD_SIZE": "2", "LOCAL_SIZE": "1", "MASTER_ADDR": "10.1.2.3"}, "10.1.2.3"),
        ({"WORLD_SIZE": "2", "LOCAL_SIZE": "1", "MASTER_ADDR": "localhost"}, "127.0.0.1"),  # as some set it on rank 0
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "::1"}, "::1"),
    ],
)
def test_each_rank_has_an_address_of_rank_0(monkeypatch, place, found):
    for name in ("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert heartbeats.meeting_address() == found


@pytest.mark.parametrize(
    "host, listens", [("127.0.0.1", "127.0.0.1"), ("192.0.2.1", "0.0.0.0"), ("no.host", "0.0.0.0")]
)
def test_rank_0_listens_where_it_can_be_found(host, listens):
    monitor = Monitor(2, 30, host)
    assert monitor.address[0] == listens
    monitor._listener.close()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def reset(connection: socket.socket) -> None:
    """End a connection as the system does for a process that is killed while something stands unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("end", [reset, socket.socket.close], ids=["reset", "closed"])
def test_last_words_are_heard_before_the_end(end):
    one, other = connected()
    with one, other:
        Connection(one, b"key").send({"step": 3})
        end(one)
        time.sleep(0.2)
        heard = Connection(other, b"key", listens=True)
        assert heard.receive() == [{"step": 3}]
        with pytest.raises(OSError):
            heard.receive()


def test_a_line_counts_once_and_not_for_the_one_who_said_it():
    for again in ("to the same", "to the sender"):
        one, other = connected()
        with one, other:
            said, heard = Connection(one, b"key"), Connection(other, b"key", listens=True)
            said.send({"step": 3})
            line = other.recv(1 << 16, socket.MSG_PEEK)
            assert heard.receive() == [{"step": 3}] and b"key" not in line
            (one if again == "to the same" else other).sendall(line)
            time.sleep(0.2)
            with pytest.raises(ValueError, match="without proof"):
                (heard if again == "to the same" else said).receive()


# abort() stands in the place of a library's destructor, as gloo's threads have been seen to end runs that were done.
PROGRAM = """
import atexit, ctypes, sys
from training.runtime.launch import leave

libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)
atexit.register(print, "closed what was open")
print("said")
leave(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("code, said", [(0, "said\nclosed what was open\n"), (75, "said\n")])
def test_no_destructor_changes_the_exit_code(code, said):
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(code)], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (code, said), ended.stderr


@pytest.mark.parametrize("say", [lambda own: own.leave(2), lambda own: own.tell("no such folder", 2)])
def test_a_rank_that_ends_by_itself_keeps_its_code_where_the_launcher_then_asks_it_to_end(say, monkeypatch):
    ended = []
    monkeypatch.setattr(watch, "end", lambda code, message: ended.append(code))
    monkeypatch.setattr(watch, "LAST_LOOK", 0.0)
    own = Watch(StopRequest(), 30.0)
    say(own)
    own.request.ask(
        Reason.SIGTERM
    )  # srun's, which takes the largest code: 75 would have the job put back and run again
    own._follow()
    assert ended == []
