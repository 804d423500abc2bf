"""A rank's share of the rows."""

import pytest

from engine import distributed
from engine.distributed import rank_share


@pytest.mark.parametrize(
    "total, ranks, shares",
    [
        (6, 1, [[0, 1, 2, 3, 4, 5]]),
        (6, 2, [[0, 1, 2], [3, 4, 5]]),
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (2, 3, [[], [0], [1]]),
        (0, 2, [[], []]),
    ],
)
def test_the_shares_of_the_ranks_are_pieces_in_their_order(total, ranks, shares, monkeypatch):
    assert [list(range(total)[rank_share(total, of=(rank, ranks))]) for rank in range(ranks)] == shares
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # another test may have joined a group
    monkeypatch.setattr(distributed, "world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        assert list(range(total)[rank_share(total)]) == shares[rank]
