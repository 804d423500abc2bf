"""Prompts, rollouts and experience: their shape checks, and cutting and joining without a number changed."""

import dataclasses

import pytest
import torch

from engine.experience import PromptBatch, Rollout, TrainingBatch, position_ids
from engine.rollout import request
from tests.engine import fake_models

PAD = 0


def prompt_batch(**changed) -> PromptBatch:
    fields = {
        "input_ids": torch.tensor([[PAD, 5, 6], [7, 8, 9]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "indices": torch.tensor([4, 2]),
        "samples": torch.tensor([0, 1]),
    }
    return PromptBatch(**{**fields, **changed})


def rollout_of(prompts: list[list[int]], responses: list[list[int]], **widths: int) -> Rollout:
    """Rows with numbers of their own, every other one with an end."""
    made = fake_models.rollout_of(prompts, responses, PAD, **widths)
    return dataclasses.replace(made, ended=made.indices % 2 == 0, indices=made.indices + 10, samples=made.indices)


def experience_of(rollout: Rollout, **changed) -> TrainingBatch:
    """Every field filled with numbers of its own: 100 x field + 10 x row + slot."""
    shape = rollout.response_mask.shape
    grid = 10.0 * torch.arange(shape[0]).unsqueeze(1) + torch.arange(shape[1])
    names = ("logprobs", "entropy", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns", "correction")
    fields = {name: 100.0 * number + grid for number, name in enumerate(names)}
    fields |= {
        name: 1000.0 * number + torch.arange(float(shape[0]))
        for number, name in enumerate(("scores", "processed_scores", "measured_kl"))
    }
    fields |= {f"{name}_mask": rollout.response_mask for name in ("policy", "value", "state")} | {"kl_coef": 0.25}
    fields["cut"] = ~rollout.response_mask
    fields["whole_scores"] = fields["scores"]
    return TrainingBatch(rollout=rollout, **{**fields, **changed})


RAGGED = ([[5], [6, 7], [8, 9]], [[1, 2], [3, 2], [4, 4, 4, 2]])


def test_positions_of_the_published_example():
    # [x, pad, pad] + [a, b, c], the mask 1 0 0 1 1 1: a token's position is the number of real tokens before it.
    assert position_ids(torch.tensor([[1, 0, 0, 1, 1, 1]])).tolist() == [[0, 1, 1, 1, 2, 3]]


def test_left_padding_shifts_no_position():
    rollout = rollout_of([[5], [6, 7, 8]], [[1, 2], [3]])
    assert rollout.position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert rollout.position_ids[0, 2:].tolist() == rollout_of([[5]], [[1, 2]]).position_ids[0].tolist()


@pytest.mark.parametrize(
    "changed",
    [
        {"attention_mask": torch.ones(2, 4, dtype=torch.int64)},
        {"samples": torch.zeros(2, dtype=torch.int32)},
        {"input_ids": torch.zeros(2, 3)},
        {"most": torch.zeros(2)},
    ],
)
def test_prompt_batches_check_their_shapes(changed):
    with pytest.raises(AssertionError, match=f"{next(iter(changed))} is .* should be"):
        prompt_batch(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"attention_mask": torch.ones(2, 4, dtype=torch.int64)},
        {"response_mask": torch.ones(2, 2, dtype=torch.int64)},
        {"response_mask": torch.ones(3, 2, dtype=torch.bool)},
        {"ended": torch.ones(2, 1, dtype=torch.bool)},
        {"samples": torch.zeros(1, dtype=torch.int64)},
        {"action_mask": torch.ones(2, 2)},
        {"turn_rewards": torch.zeros(2)},
    ],
)
def test_rollouts_check_their_shapes(changed):
    whole = rollout_of([[5], [6, 7, 8]], [[1, 2], [3]])
    with pytest.raises(AssertionError, match=f"{next(iter(changed))} is .* should be"):
        dataclasses.replace(whole, **changed)


@pytest.mark.parametrize("width", [0, 5, 6])
def test_a_rollout_has_prompt_and_response(width):
    whole = rollout_of([[5], [6, 7, 8]], [[1, 2], [3]])
    with pytest.raises(AssertionError, match=f"{width} response positions in a width of 5"):
        dataclasses.replace(whole, response_mask=torch.ones(2, width, dtype=torch.bool))


@pytest.mark.parametrize(
    "changed",
    [
        {"values": torch.zeros(2, 3)},
        {"advantages": torch.zeros(2, 2, dtype=torch.float64)},
        {"scores": torch.zeros(2, 1)},
        {"policy_mask": torch.ones(2, 2)},
        {"correction": torch.zeros(2, 1)},
        {"cut": torch.zeros(2, 2)},
    ],
)
def test_experience_checks_its_shapes(changed):
    rollout = rollout_of([[5], [6, 7, 8]], [[1, 2], [3]])
    with pytest.raises(AssertionError, match=f"{next(iter(changed))} is .* should be"):
        experience_of(rollout, **changed)


def test_nothing_can_be_reassigned():
    rollout = rollout_of(*RAGGED)
    for part, name in ((prompt_batch(), "indices"), (rollout, "sequences"), (experience_of(rollout), "rewards")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, torch.zeros(1))


def test_prompts_and_responses_are_the_two_ends_of_a_sequence():
    rollout = rollout_of([[5], [6, 7]], [[1, 2], [3]])
    assert (rollout.prompt_length, rollout.response_length, len(rollout)) == (2, 2, 2)
    assert rollout.prompts.tolist() == [[PAD, 5], [6, 7]]
    assert rollout.responses.tolist() == [[1, 2], [3, PAD]]


def test_select_leaves_out_the_padding_that_all_rows_share():
    rollout = rollout_of(*RAGGED, prompt_width=5, width=6)
    two = rollout.select(slice(0, 2))  # the longest prompt of the two has 2 tokens, the longest response 2
    assert two.sequences.tolist() == [[PAD, 5, 1, 2], [6, 7, 3, 2]]
    assert two.attention_mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert two.response_mask.tolist() == [[True, True], [True, True]]
    assert (two.ended.tolist(), two.indices.tolist(), two.samples.tolist()) == ([True, False], [10, 11], [0, 1])
    one = rollout.select(torch.tensor([0]))
    assert one.sequences.tolist() == [[5, 1, 2]]
    ragged = rollout.select(torch.tensor([2, 0]))  # in the order asked for; row 0 keeps what row 2 needs
    assert ragged.sequences.tolist() == [[8, 9, 4, 4, 4, 2], [PAD, 5, 1, 2, PAD, PAD]]
    assert ragged.response_mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert ragged.indices.tolist() == [12, 10]


def test_select_may_keep_a_slot_beyond_the_longest_response():
    rollout = rollout_of(*RAGGED, prompt_width=5, width=6)
    two = rollout.select(slice(0, 2), positions_after=1)
    assert two.sequences.tolist() == [[PAD, 5, 1, 2, PAD], [6, 7, 3, 2, PAD]]
    assert two.response_mask.tolist() == [[True, True, False]] * 2
    assert rollout_of(*RAGGED).select(slice(2, 3), positions_after=1).response_length == 4  # where there is one


def test_select_keeps_pad_tokens_that_are_part_of_the_text():
    # The pad token inside a prompt and sampled as a response token: only the masks say what is padding.
    rollout = rollout_of([[PAD, 5], [7]], [[3, PAD], [4]], prompt_width=4, width=3)
    picked = rollout.select(slice(0, 1))
    assert picked.sequences.tolist() == [[PAD, 5, 3, PAD]] and picked.attention_mask.tolist() == [[1, 1, 1, 1]]


def test_select_of_an_experience_keeps_all_its_numbers():
    wide = experience_of(rollout_of(*RAGGED, prompt_width=5, width=6))
    rows = torch.tensor([2, 0])
    picked = wide.select(rows)
    assert len(picked) == 2 and picked.rollout.response_length == 4
    for field in dataclasses.fields(TrainingBatch):
        if field.name in ("rollout", "kl_coef"):
            continue
        own, kept = getattr(wide, field.name)[rows], getattr(picked, field.name)
        assert torch.equal(kept, own if own.dim() == 1 else own[:, :4])
    assert picked.returns[1].tolist() == [700.0, 701.0, 702.0, 703.0]
    assert torch.equal(picked.policy_mask, picked.rollout.response_mask) and picked.kl_coef == 0.25


def test_select_of_an_experience_may_keep_slots_past_its_responses():
    wide = experience_of(rollout_of(*RAGGED, prompt_width=5, width=6))
    one = wide.select(slice(0, 1), positions_after=1)  # two tokens and one slot
    assert one.rewards.tolist() == [[500.0, 501.0, 502.0]] and one.rollout.response_mask.tolist() == [[1, 1, 0]]
    assert wide.select(slice(0, 1), positions_after=None).rewards.shape == (1, 6)


def test_a_cut_leaves_padding_behind_the_end():
    whole = rollout_of([[5], [6, 7]], [[1, 2, 3], [4, 2, 4]])
    kept = torch.tensor([[True, True, False], [True, True, True]])
    cut = whole.cut(kept, torch.tensor([True, False]), pad_token_id=9)
    assert cut.sequences.tolist() == [[PAD, 5, 1, 2, 9], [6, 7, 4, 2, 4]]
    assert cut.attention_mask.tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert torch.equal(cut.response_mask, kept) and cut.ended.tolist() == [True, False]


def test_all_tokens_but_the_first_may_be_asked_for():
    whole = rollout_of([[5], [6, 7]], [[1, 2], [3]])
    text = whole.from_second_token()
    assert text.sequences is whole.sequences and (text.prompt_length, text.response_length) == (1, 3)
    assert text.response_mask.tolist() == [[True, True, True], [True, True, False]]


def test_repeat_numbers_the_samples_of_each_prompt_side_by_side():
    twice = prompt_batch().repeat(2)
    assert twice.input_ids.tolist() == [[PAD, 5, 6], [PAD, 5, 6], [7, 8, 9], [7, 8, 9]]
    assert twice.attention_mask.tolist() == [[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert twice.indices.tolist() == [4, 4, 2, 2]
    assert twice.samples.tolist() == [0, 1, 2, 3]  # visit 0 draws samples 0 and 1, visit 1 draws 2 and 3
    assert prompt_batch().repeat(3).samples.tolist() == [0, 1, 2, 3, 4, 5]
    batch = prompt_batch()
    assert batch.repeat(1) is batch


def test_limits_of_rows_go_along_with_them():
    batch = prompt_batch(most=torch.tensor([7, 9]), first_row=40)
    for changed, most in (
        (batch.to("cpu"), [7, 9]),
        (batch.select([1]), [9]),
        (batch.repeat(2), [7, 7, 9, 9]),
        (request._joined_prompts([batch, batch]), [7, 9, 7, 9]),
    ):
        assert changed.most.tolist() == most and changed.first_row == 40


def test_what_the_policy_drew_goes_along_with_its_rows():
    turns = [[[1, 2], [3], [2]], [[4]]]
    whole = fake_models.conversation_of([[5], [6, 7]], turns, PAD, prompt_width=4, width=6)
    rows = [[True, True, False, True], [True, False, False, False]]
    assert whole.actions[:, :4].tolist() == rows
    for part in (
        whole.select(slice(None)),
        whole.cut(whole.response_mask, whole.ended, PAD).select(slice(None)),
        request.copied(whole, "cpu").select(slice(None)),
        request.joined([whole.select(slice(0, 1)), whole.select(slice(1, 2))], PAD),
    ):
        assert part.action_mask.tolist() == part.actions.tolist() == rows
        assert part.turn_rewards.tolist() == [[0, 1, 0, 2], [1, 0, 0, 0]]
    assert whole.select(slice(1, 2)).actions.tolist() == [[True]]
    assert torch.equal(whole.from_second_token().actions, whole.attention_mask[:, 1:].bool())  # prompts too
    alone = rollout_of(*RAGGED)
    assert alone.actions is alone.response_mask


def test_repeats_of_different_visits_never_share_a_number():
    numbers = [prompt_batch(samples=torch.full((2,), visit)).repeat(4).samples[:4].tolist() for visit in range(5)]
    assert sum(numbers, []) == list(range(20))
