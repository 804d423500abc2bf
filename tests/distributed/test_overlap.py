"""A copy that is filled while the critic trains: what is learned and drawn is the same, bit for bit."""

import pytest
import torch

from tests.distributed.harness import run_ranks


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.work_overlap:both_ways", world=2, folder=folder)


def test_not_a_bit_changes(ranks):
    for rank in ranks:
        for role, weights in rank[False]["weights"].items():
            assert all(torch.equal(weight, rank[True]["weights"][role][name]) for name, weight in weights.items())
        assert all(map(torch.equal, rank[False]["responses"], rank[True]["responses"]))
        assert rank[False]["losses"] == rank[True]["losses"]


def test_the_actor_steps_first_in_the_last_update_alone(ranks):
    update = ["critic steps", "actor steps"]
    for rank in ranks:
        assert rank[False]["events"] == update * 4
        assert rank[True]["events"] == update * 3 + ["actor steps", "begun", "critic steps"]


def test_what_was_begun_is_what_generates(ranks):
    """Nothing is gathered for the third step's generation but what the second began; a fill follows for the fourth."""
    for rank in ranks:
        assert (rank[False]["begun"], rank[True]["begun"]) == (False, True)
        assert (rank[False]["fills"], rank[True]["fills"]) == (1, 1)


def test_ranks_agree_on_memory_once_a_fill_and_once_a_model(ranks):
    """The actor's copy, which has just generated, makes one pass to compare; reference, critic and reward model are
    gathered first."""
    assert [rank[True]["agreements"] for rank in ranks] == [1 + 3 * 2] * 2
