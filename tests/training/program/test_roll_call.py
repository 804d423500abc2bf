"""What is found out about ranks from what they say, and from what they do not say."""

import contextlib
import hmac
import os
import socket
import time

import pytest

from engine import trace
from training.program import lines, roll_call
from training.program.member import Member, print_line
from training.program.phases import Place
from training.program.roll_call import RollCall, Verdict


@pytest.fixture
def two_ranks(monkeypatch):
    """The roll call of two ranks that are both this process, with rounds of a twentieth of a second."""
    for module in ("roll_call", "member"):
        monkeypatch.setattr(f"training.program.{module}.ROUND", 0.05)
        monkeypatch.setattr(f"training.program.{module}.LINE", 20)
        monkeypatch.setattr(f"training.program.{module}.SILENT", 40)
    call = RollCall(2, timeout_minutes=30)
    call.start()
    members = [Member(rank, call.address, call.key) for rank in (0, 1)]
    yield call, members
    call.close()
    for member in members:
        member.close()


def verdict(speaking: list[Member], seconds: float = 30.0) -> Verdict | None:
    """What the first of them hears while all of them speak."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and speaking[0].verdict is None:
        for member in speaking:
            member.look()
        time.sleep(0.01)
    return speaking[0].verdict


def test_ranks_that_speak_and_leave_are_no_matter(two_ranks):
    _, members = two_ranks
    assert verdict(members, seconds=3) is None
    members[1].say(left=0)
    members[1].close()
    assert verdict(members[:1], seconds=3) is None


def test_one_that_has_left_does_not_mind_the_end_of_rank_0(two_ranks):
    call, members = two_ranks
    members[1].say(left=0)
    call.close()
    assert verdict(members[1:], seconds=2) is None


def test_a_connection_that_ends_without_a_word_is_a_death(two_ranks):
    _, members = two_ranks
    verdict(members, seconds=0.5)
    members[1].close()
    found = verdict(members[:1])
    assert found.code == 1
    assert f"rank 1 (process {os.getpid()} on " in found.message and "has died in phase outside of" in found.message


def test_the_first_rank_with_an_error_is_quoted(two_ranks):
    _, members = two_ranks
    members[1].say(trouble="Traceback: broken")
    assert verdict(members).message == "rank 1: Traceback: broken"


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
    _, members = two_ranks
    members[0].say(host="gpu1", **others)
    members[1].say(host="gpu2", **first)
    found = verdict(members)
    assert (found.message, found.code) == (message, first.get("code", 1))


def test_silence_of_a_process_that_runs_is_no_end(two_ranks):
    """Its state by the kernel is looked up by rank 0, which stands on the same machine: a long call, not a stop."""
    call, members = two_ranks
    verdict(members, seconds=0.5)
    assert verdict(members[:1], seconds=5) is None
    assert call.ranks[1].quiet > roll_call.SILENT and call.ranks[1].state in ("R", "S")


def test_silence_of_a_stopped_process_is_an_end(two_ranks, monkeypatch):
    _, members = two_ranks
    verdict(members, seconds=0.5)
    monkeypatch.setattr("training.program.member.state_of", lambda pid: "T")
    found = verdict(members[:1])
    assert "rank 1" in found.message and "is stopped (a signal stopped its process)" in found.message
    assert found.stuck == [[members[1].machine, os.getpid()]]


def test_ranks_that_all_stand_still_are_ended_and_one_is_named(two_ranks, monkeypatch):
    call, members = two_ranks
    call.timeout = 30
    monkeypatch.setattr("training.program.phases.place.phase", "generate")
    trace.moved("vLLM takes weights")
    found = verdict(members)
    assert "no rank has moved for" in found.message and "--timeout_minutes" in found.message
    assert "is in phase generate" in found.message and "; last begun: vLLM takes weights)" in found.message
    assert found.stacks == [0]


def test_ranks_that_stand_still_in_one_phase_are_named_by_what_they_began_last(two_ranks):
    call, members = two_ranks
    call.timeout = 30
    members[0].say(phase="generate", last="gather of weights")
    members[1].say(phase="generate", last="vLLM takes weights")
    found = verdict(members)
    first, second = found.message.split(", rank 1 ")
    assert "rank 0 " in first and "last begun: gather of weights)" in first
    assert "is in phase generate" in second and "last begun: vLLM takes weights)" in second
    assert found.stacks == [0, 1]


@pytest.mark.parametrize("stuck", (0, 1))
def test_of_two_ranks_the_one_that_is_longer_in_its_phase_is_waited_for(two_ranks, stuck):
    call, members = two_ranks
    call.timeout = 30
    members[stuck].say(phase="generate", since=1000.0, last="vLLM draws a token")
    members[1 - stuck].say(phase="make_experience", since=1001.0, last="policy forward")
    found = verdict(members)
    assert f": rank {stuck} " in found.message and "is in phase generate" in found.message
    assert "make_experience" not in found.message and found.stacks == [stuck]


STRANGE = {
    "a number": b"5\n",
    "no object": b"[]\n",
    "deep": b"[" * 100_000 + b"\n",
    "no JSON": bytes(range(256)) + b"\n",
    "another key's proof": hmac.digest(b"another key", b"caller 0 {}", "sha256").hex().encode() + b" {}\n",
    "without end": b"a" * (lines.LONGEST + (1 << 20)),
    "nothing": b"",
}


def test_strangers_are_told_nothing_and_change_nothing(monkeypatch):
    monkeypatch.setattr(roll_call, "PROVE", 1.0)
    call = RollCall(2, timeout_minutes=30)
    call.start()
    strangers = {name: socket.create_connection(call.address, timeout=30) for name in STRANGE}
    crowd = [socket.create_connection(call.address, timeout=30) for _ in range(3 * roll_call.STRANGERS)]
    with contextlib.suppress(OSError):
        for name, words in STRANGE.items():
            strangers[name].sendall(words)
    for name, stranger in strangers.items():
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b"", name  # after a second it is dropped, and has heard nothing
    members = [Member(rank, call.address, call.key) for rank in (0, 1)]
    assert verdict(members, seconds=2) is None and all(rank.beat for rank in call.ranks)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(call.address, timeout=30)
    members[1].say(trouble="\x1b[31mbroken")
    assert verdict(members).message == "rank 1: \x1b[31mbroken"
    for one in [call, *members, *strangers.values(), *crowd]:
        one.close()


def test_a_rank_has_one_connection_and_another_one_takes_nobodys_place():
    call = RollCall(3, timeout_minutes=30)
    call.start()
    members = [Member(rank, call.address, call.key) for rank in (0, 1)]
    assert verdict(members, seconds=1) is None
    again = Member(1, call.address, call.key)  # as one who says again what rank 1 has said
    assert verdict(members, seconds=2) is None and len(call._lines) == 2 and not call._strangers
    members.append(Member(2, call.address, call.key))
    assert verdict(members, seconds=2) is None and all(rank.beat for rank in call.ranks)
    for one in [call, again, *members]:
        one.close()


def test_what_a_terminal_would_obey_is_shown(capfd):
    print_line("one\x1b]0;title\x07\n\ttwo é")
    assert capfd.readouterr().err == "one\\x1b]0;title\\x07\n\ttwo é\n"


def test_where_rank_0_was_is_known_though_nobody_listened_before_it_died(two_ranks, monkeypatch, capfd):
    call, members = two_ranks
    verdict(members, seconds=0.5)
    monkeypatch.setattr("training.program.member.place", Place("train", 3))
    call.pass_on(members[0].say())
    call.close()
    time.sleep(0.1)
    for _ in range(3):  # the first that is said to one who has gone is no error yet
        members[1].say()
        time.sleep(0.1)
    assert verdict(members[1:]).code == 1
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
    assert roll_call.meeting_address() == found


@pytest.mark.parametrize(
    "host, listens", [("127.0.0.1", "127.0.0.1"), ("192.0.2.1", "0.0.0.0"), ("no.host", "0.0.0.0")]
)
def test_rank_0_listens_where_it_can_be_found(host, listens):
    call = RollCall(2, 30, host)
    assert call.address[0] == listens
    call._listener.close()
