"""Facts of ranks through the store where they are to meet, and the nodes that they become; bandwidth, by hand."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from engine.errors import UserError
from scripts.harness import free_port
from tests.training.tools.preflight.nodes import healthy
from training.tools.preflight import exchange
from training.tools.preflight.exchange import Exchange, hosts_by_rank, nodes_of
from training.tools.preflight.preflight import Timed
from training.tools.preflight.table import findings


@pytest.fixture
def environment() -> dict[str, str]:
    return {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def test_facts_of_ranks_come_and_what_is_published_is_heard(environment):
    zero = Exchange.served("looks", environment)
    one, two = (Exchange.reached("looks", 10.0, {**environment, "RANK": rank}) for rank in "12")
    with ThreadPoolExecutor() as pool:
        hearing = pool.submit(one.published, "verdict")
        two.post({"host": "gpu03"})
        one.post({"host": "gpu02"})
        assert zero.facts({"host": "gpu01"}, 3, 10.0) == {rank: {"host": f"gpu0{rank + 1}"} for rank in range(3)}
        assert not hearing.done()
        zero.publish("verdict", {"fault": True})
        assert hearing.result() == two.published("verdict") == {"fault": True}
    began = time.monotonic()
    zero.linger("verdict", 2)
    assert time.monotonic() - began < exchange.LINGER  # both have heard it


def test_those_that_are_missing_are_waited_for_as_long_as_others_come(environment):
    zero, one = Exchange.served("looks", environment), Exchange.reached("looks", 10.0, environment)
    one.post({"host": "gpu02"})
    assert set(zero.facts({}, 3, 1.0)) == {0, 1}
    assert set(zero.facts({}, 3, 60.0, over=lambda: True)) == {0}


def test_what_no_rank_has_written_is_passed_over(environment):
    zero, one = Exchange.served("looks", environment), Exchange.reached("looks", 10.0, environment)
    for text in ("5", "[" * 100_000, "\xff"):
        zero._store.set(f"{zero._name}/1", text)
        assert set(zero.facts({}, 2, 0.3)) == {0}
    one.post({"host": "gpu02"})
    assert zero.facts({}, 2, 10.0)[1] == {"host": "gpu02"}


def test_a_start_after_another_hears_nothing_of_it(environment):
    zero = Exchange.served("looks", environment)
    Exchange.reached("looks", 10.0, environment).post({"host": "gpu02"})
    again = {**environment, "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert set(Exchange.served("looks", again).facts({}, 2, 0.3)) == {0}
    assert set(zero.facts({}, 2, 10.0)) == {0, 1}


def test_nobody_who_answers_is_told_with_the_place(environment):
    with pytest.raises(UserError, match=f"no answer from rank 0 at 127.0.0.1:{environment['MASTER_PORT']} within 0 s"):
        Exchange.reached("looks", 0.3, environment)


def test_a_host_that_is_cut_off_ends_the_waiting(environment, monkeypatch):
    monkeypatch.setattr(exchange, "ANSWER", 0.5)
    zero, one = Exchange.served("looks", environment), Exchange.reached("looks", 10.0, environment)
    with pytest.raises(UserError, match=f"no answer from rank 0 at 127.0.0.1:{environment['MASTER_PORT']} within"):
        one._ask(time.sleep, 5.0)  # as a call to torch's store does that is never answered
    del zero


def test_a_port_that_another_process_has_is_told(environment):
    with (
        socket.create_server(("", int(environment["MASTER_PORT"]))),
        pytest.raises(UserError, match=rf"^MASTER_PORT {environment['MASTER_PORT']} cannot be listened at \(.+\)\."),
    ):
        Exchange.served("looks", environment)


def test_a_rank_0_that_has_gone_is_told(environment):
    zero, one = Exchange.served("looks", environment), Exchange.reached("looks", 10.0, environment)
    del zero
    with pytest.raises(UserError, match="rank 0 has gone"):
        for _ in range(100):
            one.post({"host": "gpu02"})


def posted(*ranks: tuple[str, int]) -> dict[int, dict]:
    """By ranks in their order, each by its host and its number there."""
    facts = {row: asdict(fact) for row, fact in healthy().facts.items()}
    return {rank: {"host": host} | ({"facts": facts} if not local else {}) for rank, (host, local) in enumerate(ranks)}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [("a", (0, 1)), ("b", (2, 3))]),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [("a", (0, 2)), ("b", (1, 3))]),  # srun --distribution=cyclic
        ([("box", 0), ("box", 1), ("box", 0), ("box", 1)], [("box", (0, 1)), ("box", (2, 3))]),  # containers
    ],
)
def test_each_node_has_its_own_ranks_and_facts(ranks, expected):
    nodes = nodes_of(posted(*ranks))
    assert [(node.host, node.ranks) for node in nodes] == expected
    assert all(node.facts == healthy().facts for node in nodes) and findings(nodes) == []


def test_a_host_whose_first_rank_has_not_written_is_no_node():
    told = posted(("a", 0), ("a", 1), ("b", 0), ("b", 1))
    del told[2]
    assert [node.ranks for node in nodes_of(told)] == [(0, 1)]


@pytest.mark.parametrize(
    "told", [{}, {"host": "b", "facts": 5}, {"host": [], "facts": {}}, {"host": "b", "facts": {"torch": {"shown": 5}}}]
)
def test_facts_that_cannot_be_read_are_one_message(told):
    with pytest.raises(UserError, match="Another version of this program runs on a host, or another program writes"):
        nodes_of({**posted(("a", 0)), 1: told})


def test_hosts_of_ranks_are_those_that_deepspeed_tells_its_launchers():
    # {"gpu01": [0, 1], "gpu02": [0, 3]}
    words = [
        "python",
        "-m",
        "deepspeed.launcher.launch",
        "--world_info=eyJncHUwMSI6IFswLCAxXSwgImdwdTAyIjogWzAsIDNdfQ==",
    ]
    assert hosts_by_rank(4, [["bash"], words]) == {0: "gpu01", 1: "gpu01", 2: "gpu02", 3: "gpu02"}
    assert hosts_by_rank(2, [["bash"]]) == {0: "", 1: ""}
    assert hosts_by_rank(1, [["--world_info=?"]]) == {0: ""}


MIB = 1 << 20


def test_bandwidth_is_what_goes_through_a_link():
    summed = Timed(4, {MIB: 1.0, 64 * MIB: 2.0})
    assert summed.bandwidth == 2 * 3 / 4 * 64 * MIB / 2.0
    assert str(summed) == "4 ranks: 0.0503 GB/s (1 MiB 1e+03 ms, 64 MiB 2e+03 ms)"
