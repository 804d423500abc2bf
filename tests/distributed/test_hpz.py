"""hpZ on 4 ranks: engines with groups of 2, of 4 and without in one process, and what they compute."""

import json
from pathlib import Path

import pytest
import torch

from scripts.harness.ranks import run_ranks

SIZES = {"actor": 2, "critic": 4, "reference": 2, "reward": None}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    plain = json.loads((Path(folder) / "stage3.json").read_text())
    for size in (2, 4):
        zero = plain["zero_optimization"] | {"zero_hpz_partition_size": size}
        (Path(folder) / f"hpz{size}.json").write_text(json.dumps(plain | {"zero_optimization": zero}))
    return run_ranks("tests.distributed.work_hpz:all_cases", world=4, folder=folder, sizes=SIZES)


def test_each_engine_has_groups_of_its_own_size(ranks):
    for rank in ranks:
        assert rank["groups"] == {role: {size} for role, size in SIZES.items()}


def test_a_model_learns_the_same_as_without(ranks):
    for rank in ranks:
        for got, expected in zip(rank["hpz"]["logprobs"], rank["plain"]["logprobs"], strict=True):
            assert torch.equal(got, expected)
        for name, weight in rank["plain"]["weights"].items():
            assert torch.equal(rank["hpz"]["weights"][name], weight), name
        first, *_, swapped, last = rank["plain"]["logprobs"]
        assert (first - last).abs().max() > 0.05 and (swapped - last).abs().max() > 0.05  # the test would see it


def test_second_copies_go_when_the_weights_change(ranks):
    for rank in ranks:
        computed, *stepped = rank["hpz"]["copies"]
        assert computed > 10 and stepped == [0, 0] and set(rank["plain"]["copies"]) == {0}


def test_weights_that_do_not_train_are_those_of_the_restart_point(ranks):
    for rank in ranks:
        found = rank["frozen"]
        assert torch.allclose(found["after"], found["expected"], atol=1e-5)
        assert (found["after"] - found["before"]).abs().max() > 0.05
