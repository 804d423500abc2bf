"""A rank's share; what loading an extension of DeepSpeed's clears away, and that one process at a time does it."""

import fcntl
from types import SimpleNamespace

import pytest

from engine.distributed import load_extension, rank_share


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
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        assert list(range(total)[rank_share(total)]) == shares[rank]


def test_the_mark_of_a_killed_build_is_removed_before_and_nobody_else_builds_meanwhile(tmp_path, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    mark = tmp_path / "py311" / "op" / "lock"
    mark.parent.mkdir(parents=True)
    mark.touch()
    loaded = []

    def load():
        assert not mark.exists()
        with (tmp_path / "four_engine_rlhf.lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        loaded.append(True)

    builders = {
        "Fits": SimpleNamespace(NAME="fits", is_compatible=lambda: True, load=load),
        "DoesNot": SimpleNamespace(NAME="does_not", is_compatible=lambda: False, load=load),
    }
    monkeypatch.setattr(get_accelerator(), "create_op_builder", builders.get)
    load_extension("Fits")
    load_extension("DoesNot")
    load_extension("Unknown")
    assert loaded == [True]
    with (tmp_path / "four_engine_rlhf.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given up again
