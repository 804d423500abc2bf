"""Gathers in two stages give what those in one do, and are made where nodes have equally many ranks."""

import dataclasses

import pytest
import torch

from engine.by_node import WHAT
from tests.distributed import plain
from tests.distributed.harness import run_ranks
from training.flags.arguments import RunFlags


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.work_by_node:on_two_nodes", world=4, folder=folder)


@pytest.mark.parametrize(
    "layout, expected", [("one node", None), ("uneven", None), ("nothing", None), ("two nodes", 2)]
)
def test_where_it_goes_by_node(ranks, layout, expected):
    assert [rank[layout] for rank in ranks] == [expected] * 4


def test_weights_are_gathered_whole(ranks, folder):
    weights = list(plain.policy(folder).parameters())
    for rank in ranks:
        for layout in ("flat", "by node"):
            assert all(torch.equal(own, weight) for own, weight in zip(rank[layout], weights, strict=True))


def test_parts_come_in_the_order_of_ranks(ranks):
    for rank in ranks:
        assert rank["apart"].tolist() == [[0, 7], [1, 7], [2, 7], [3, 7]]
        assert rank["later"].tolist() == [0, 9, 1, 9, 2, 9, 3, 9]


def test_each_rank_is_given_its_sums(ranks):
    """Rank r has r + 1 times 0 to 7: ten times these in all."""
    assert [rank["sums"].tolist() for rank in ranks] == [[0, 10], [20, 30], [40, 50], [60, 70]]


def test_the_flag_has_the_same_choices():
    (flag,) = (field for field in dataclasses.fields(RunFlags) if field.name == "by_node")
    assert flag.metadata["choices"] == WHAT and flag.default in WHAT
