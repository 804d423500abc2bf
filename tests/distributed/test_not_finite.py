"""A number of one rank that is NaN or infinite stops both, before it reaches a weight that is kept; --max_kl too."""

import pytest

from scripts.harness.ranks import run_ranks
from tests.distributed.work_not_finite import EXPERIENCE

STAGES = {"stage 0": 0, "stage 3": 3}
KINDS = (*EXPERIENCE, "policy loss", "value loss", "actor gradient", "critic gradient")
# All is seen in the second step, before its update: what the first step left may be at fault, or may not.
BY_THE_LAST_UPDATE = ("logprobs", "values")
SAID = {"scores": "score (1)", "policy loss": "policy loss (nan)", "value loss": "value loss (nan)"} | {
    "actor gradient": "policy gradient",
    "critic gradient": "value gradient",
}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.work_not_finite:all_kinds", folder=folder, stages=STAGES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_both_ranks_stop_with_one_message_and_no_weight_changes(ranks, stage, kind):
    one, other = (rank[stage][kind] for rank in ranks)
    assert one["message"] == other["message"]
    assert one["message"].startswith("step 2: a number is NaN or infinite, and nothing was learned from it.\n")
    assert f"rank 1: not finite: {SAID.get(kind, f'{kind} (1)')}" in one["message"]
    for found in (one, other):
        assert found["unchanged"] and found["steps_done"] == 1
        assert found["good_until"] == (0 if kind in BY_THE_LAST_UPDATE else 1)


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_an_update_made_infinite_ends_the_step(ranks, stage):
    for rank in ranks:
        found = rank[stage]["critic weight"]
        assert "step 2: after its update not finite" in found["message"] and "weights of the critic" in found["message"]
        assert "actor" not in found["message"]
        assert found["good_until"] == 1 and found["steps_done"] == 1


def test_max_kl_is_of_all_ranks_responses_and_stops_before_the_update(folder):
    """Of 12 tokens at most, each 1 nat further on one rank of two: a mean of at most 6 nats more, over 1."""
    for rank in run_ranks("tests.distributed.work_not_finite:too_far", folder=folder, limit=1.0):
        assert abs(rank["first"]) < 0.1
        assert "step 2: objective/kl is " in rank["message"] and "over --max_kl 1" in rank["message"]
        assert rank["unchanged"] and rank["steps_done"] == 1
        assert rank["good_until"] == 0  # that of the start: what the first step made is too far
    for rank in run_ranks("tests.distributed.work_not_finite:too_far", folder=folder, limit=6.5):
        assert rank["message"] == "None" and not rank["unchanged"]
        other = rank["other_reference"]  # of rank 1 alone, so about half a nat over both
        assert other["message"].startswith("step 1: no weight has been changed") and "differ by 0." in other["message"]
        assert other["unchanged"] and other["steps_done"] == 0


def test_fp16_at_the_floor_of_its_loss_scale_stops_after_16_overflows_at_every_stage(folder):
    """From 2^8, halved by each overflow, to the least, 1: 8 updates; and then 16 that leave it there."""
    for rank in run_ranks("tests.distributed.work_not_finite:at_the_floor", folder=folder, stages=(0, 2, 3)):
        for updates, scale, message in rank.values():
            assert (updates, scale) == (24, 1.0)
            assert (
                "fp16: the actor's gradients overflowed 16 times in a row with the loss scale at its floor, 1"
                in message
            )
