"""DeepSpeed's bf16_master_weights_and_grads and bf16_optimizer_states: what is in 16 bits then, and what is not."""

import pytest
import torch

from scripts.harness.ranks import run_ranks

STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.work_bf16_masters:both", folder=folder, stages=STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_masters_and_moments_are_in_16_bits_and_averages_in_32(ranks, stage):
    for rank in ranks:
        found = rank[stage]["trained"]
        assert {tensor.dtype for name in ("weights", "masters", "moments") for tensor in _all(found[name])} == {
            torch.bfloat16
        }
        assert {mean.dtype for mean in found["means"]} == {torch.float32}
        assert any((mean != mean.bfloat16()).any() for mean in found["means"])  # more than bfloat16 holds


@pytest.mark.parametrize("stage", STAGES)
def test_it_learns(ranks, stage):
    first, last = ranks[0][stage]["losses"]
    assert last < first - 0.02


@pytest.mark.parametrize("stage", STAGES)
def test_after_the_averages_were_swapped_in_all_is_as_before(ranks, stage):
    for rank in ranks:
        assert rank[stage]["swapped"] and _equal(rank[stage]["trained"], rank[stage]["after"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_restart_point_has_all_of_it(ranks, stage):
    for rank in ranks:
        assert _equal(rank[stage]["trained"], rank[stage]["restored"])


def _all(tensors) -> list[torch.Tensor]:
    return list(tensors.values()) if isinstance(tensors, dict) else tensors


def _equal(one: dict, other: dict) -> bool:
    return all(
        len(one[name]) == len(other[name])
        and all(torch.equal(a, b) for a, b in zip(_all(one[name]), _all(other[name])))
        for name in one
    )
