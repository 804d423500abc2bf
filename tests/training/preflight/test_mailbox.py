"""Letters between ranks through the store where they are to meet."""

import socket

import pytest

from engine.errors import UserError
from scripts.harness import free_port
from training.preflight.mailbox import Mailbox, NoAnswer


@pytest.fixture
def environment() -> dict[str, str]:
    return {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def test_letters_come_once_and_answers_in_their_order(environment):
    zero = Mailbox.served("looks", environment)
    one = Mailbox.reached("looks", 10.0, environment)
    one.post({"ask": 1})
    one.post({"host": "gpu02"})
    assert zero.letters() == [{"ask": 1, "rank": 1}, {"host": "gpu02", "rank": 1}]
    assert zero.letters() == []
    zero.answer(1, {"time": 1})
    zero.answer(1, {"time": 2})
    zero.answer(3, {"time": 3})
    reached = []
    assert [one.wait(10.0, lambda: reached.append(1))["time"] for _ in range(2)] == [1, 2]
    with pytest.raises(NoAnswer, match="rank 0 has said nothing for 0 s"):
        one.wait(0.1, lambda: reached.append(1))
    assert reached  # the store has answered meanwhile, and rank 0 has not


def test_what_no_rank_has_written_is_passed_over(environment):
    zero = Mailbox.served("looks", environment)
    one = Mailbox.reached("looks", 10.0, environment)
    for text in ("5", "[" * 100_000, '{"rank": "1"}', "\xff"):
        zero._store.set(f"{zero._number}/{zero._store.add(zero._number, 1)}", text)
    one.post({"ask": 1})
    assert zero.letters() == [{"ask": 1, "rank": 1}]
    zero._store.set(f"{zero._name}/answer/1/1", "5")
    with pytest.raises(NoAnswer, match="is not from rank 0"):
        one.wait(10.0)


def test_a_start_after_another_hears_nothing_of_it(environment):
    zero = Mailbox.served("looks", environment)
    Mailbox.reached("looks", 10.0, environment).post({"host": "gpu02"})
    again = {**environment, "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert Mailbox.served("looks", again).letters() == []
    assert len(zero.letters()) == 1


def test_nobody_who_answers_is_told_with_the_place(environment):
    with pytest.raises(NoAnswer, match=f"no answer from rank 0 at 127.0.0.1:{environment['MASTER_PORT']} within 0 s"):
        Mailbox.reached("looks", 0.3, environment)


def test_a_port_that_another_process_has_is_told(environment):
    with (
        socket.create_server(("", int(environment["MASTER_PORT"]))),
        pytest.raises(UserError, match=rf"^MASTER_PORT {environment['MASTER_PORT']} cannot be listened at \(.+\)\."),
    ):
        Mailbox.served("looks", environment)


def test_a_rank_0_that_has_gone_is_told(environment):
    zero = Mailbox.served("looks", environment)
    one = Mailbox.reached("looks", 10.0, environment)
    del zero
    with pytest.raises(NoAnswer, match="rank 0 has gone"):
        for _ in range(100):
            one.post({"host": "gpu02"})
