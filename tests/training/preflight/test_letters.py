"""Letters of ranks become nodes."""

from dataclasses import asdict

import pytest

from engine.errors import UserError
from tests.training.preflight.nodes import A100, healthy
from training.preflight.comparison import in_short
from training.preflight.letters import nodes_of


def letters(*ranks: tuple[str, int]) -> dict[int, dict]:
    """Of ranks in their order, each by its host and its number there."""
    return {
        rank: {"rank": rank, "host": host, "card": asdict(A100)}
        | ({"node": healthy(host).as_json()} if not local else {})
        for rank, (host, local) in enumerate(ranks)
    }


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [("a", (0, 1)), ("b", (2, 3))]),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [("a", (0, 2)), ("b", (1, 3))]),  # srun --distribution=cyclic
        ([("box", 0), ("box", 1), ("box", 0), ("box", 1)], [("box", (0, 1)), ("box", (2, 3))]),  # containers
    ],
)
def test_each_node_has_its_own_ranks_and_their_gpus(ranks, expected):
    nodes = nodes_of(letters(*ranks))
    assert [(node.host, node.ranks) for node in nodes] == expected
    assert [len(node.cards) for node in nodes] == [2, 2]
    assert in_short(nodes) == []


def test_a_host_whose_first_rank_has_not_written_is_no_node():
    told = letters(("a", 0), ("a", 1), ("b", 0), ("b", 1))
    del told[2]
    assert [node.ranks for node in nodes_of(told)] == [(0, 1)]


@pytest.mark.parametrize("told", [{"rank": 1}, {"rank": 1, "host": "b", "node": 5, "card": None}])
def test_letters_that_cannot_be_read_are_one_message(told):
    with pytest.raises(UserError, match="Another version of this program runs on a host, or another program writes"):
        nodes_of({**letters(("a", 0)), 1: told})
