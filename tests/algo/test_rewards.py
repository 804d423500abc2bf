"""Which slot receives the score, how long a response is taken to be, and the rewards of the worked case.

A: three tokens, EOS, two pads, pad differs from EOS. B: the same with pad equal to EOS. C: six tokens, no EOS.
"""

import pytest
import torch

from engine.algo.rewards import compute_rewards, counted_tokens, first_positions, positions_up_to, score_positions

EOS, PAD = 2, 9
SAMPLED_4, SAMPLED_6 = [True] * 4 + [False] * 2, [True] * 6
CASES = {  # tokens, response mask, pad token
    "A": ([11, 12, 13, EOS, PAD, PAD], SAMPLED_4, PAD),
    "B": ([11, 12, 13, EOS, EOS, EOS], SAMPLED_4, EOS),
    "C": ([11, 12, 13, 14, 15, 16], SAMPLED_6, PAD),
}
RULES = {"default": ("sampled", "last"), "deepspeed_chat": ("before_pad", "after_last")}


def counted_lengths(responses: torch.Tensor, mask: torch.Tensor, pad: int, rule: str) -> torch.Tensor:
    """L of each row."""
    return counted_tokens(responses, mask, pad, rule).sum(-1)


def lengths_of(case: str, rule: str, width: int = 6) -> torch.Tensor:
    tokens, mask, pad = CASES[case]
    return counted_lengths(torch.tensor([tokens[:width]]), torch.tensor([mask[:width]]), pad, rule)


@pytest.mark.parametrize(
    "system, case, width, length, slot",
    [
        ("default", "A", 6, 4, 3),
        ("default", "B", 6, 4, 3),
        ("default", "C", 6, 6, 5),
        ("deepspeed_chat", "A", 6, 4, 4),
        ("deepspeed_chat", "B", 6, 3, 3),
        ("deepspeed_chat", "C", 6, 6, 5),
        ("default", "A", 5, 4, 3),
        ("default", "A", 4, 4, 3),
        ("default", "B", 4, 4, 3),
        ("default", "C", 4, 4, 3),
        ("deepspeed_chat", "A", 5, 4, 4),
        ("deepspeed_chat", "A", 4, 4, 3),
        ("deepspeed_chat", "B", 5, 3, 3),
        ("deepspeed_chat", "B", 4, 3, 3),
        ("deepspeed_chat", "C", 4, 4, 3),
    ],
)
def test_score_slots_of_the_table(system, case, width, length, slot):
    length_rule, slot_rule = RULES[system]
    lengths = lengths_of(case, length_rule, width)
    assert lengths.tolist() == [length]
    assert score_positions(lengths, width, slot_rule).tolist() == [slot]


def test_lengths_of_a_ragged_batch():
    responses = torch.tensor([[5, EOS, 9, 9], [5, 6, 7, 8], [EOS, 9, 9, 9], [5, 6, 7, EOS]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert counted_lengths(responses, mask, PAD, "sampled").tolist() == [2, 4, 1, 4]
    assert counted_lengths(responses, mask, PAD, "before_pad").tolist() == [2, 4, 1, 4]
    responses[responses == PAD] = EOS  # pad == eos: EOS itself no longer counts before the first pad
    assert counted_lengths(responses, mask, EOS, "sampled").tolist() == [2, 4, 1, 4]
    assert counted_lengths(responses, mask, EOS, "before_pad").tolist() == [1, 4, 0, 3]


def test_a_pad_token_of_id_0_is_a_token_like_any_other():
    responses = torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    assert counted_lengths(responses, mask, 0, "before_pad").tolist() == [2, 4]
    assert counted_lengths(responses, mask, 0, "sampled").tolist() == [2, 4]


def test_a_pad_token_sampled_in_the_middle():
    responses, mask = torch.tensor([[5, 0, 7, EOS, 0, 0], [0, 6, 7, EOS, 0, 0]]), torch.tensor([SAMPLED_4, SAMPLED_4])
    assert counted_lengths(responses, mask, 0, "sampled").tolist() == [4, 4]
    assert counted_lengths(responses, mask, 0, "before_pad").tolist() == [1, 0]
    assert counted_lengths(responses, mask, 0, "not_pad").tolist() == [3, 3]
    assert counted_tokens(responses, mask, 0, "not_pad").int().tolist() == [[1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0]]
    assert counted_lengths(responses, mask, 0, "row").tolist() == [6, 6]


def test_padding_is_what_was_not_sampled_whatever_stands_there():
    responses, mask = torch.tensor([[5, 6, 77, 88]]), torch.tensor([[True, True, False, False]])
    assert counted_lengths(responses, mask, PAD, "before_pad").tolist() == [2]


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="'longest': known are sampled, before_pad, not_pad, row"):
        counted_lengths(torch.zeros(1, 1).long(), torch.ones(1, 1).bool(), 0, "longest")
    with pytest.raises(ValueError, match="'first': known are last, after_last, two_after"):
        score_positions(torch.ones(1).long(), 1, "first")
    with pytest.raises(ValueError, match="'three_past': known are response, one_past, two_past, all"):
        positions_up_to(torch.ones(1).long(), 1, "three_past")


def test_slots_stay_within_the_row():
    lengths = torch.tensor([0, 1, 3, 4])
    assert score_positions(lengths, 4, "last").tolist() == [0, 0, 2, 3]
    assert score_positions(lengths, 4, "after_last").tolist() == [0, 1, 3, 3]
    assert score_positions(lengths, 4, "two_after").tolist() == [1, 2, 3, 3]


def test_first_slots():
    assert first_positions(torch.tensor([0, 2, 3, 7]), 3).int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]


def test_slots_up_to_and_past_the_response():
    lengths = torch.tensor([1, 3, 4])
    assert positions_up_to(lengths, 4, "response").sum(-1).tolist() == [1, 3, 4]
    assert positions_up_to(lengths, 4, "one_past").sum(-1).tolist() == [2, 4, 4]
    assert positions_up_to(lengths, 4, "two_past").sum(-1).tolist() == [3, 4, 4]
    assert positions_up_to(lengths, 4, "all").all()


@pytest.mark.parametrize(
    "kl_slots, score_slot, expected",
    [
        (4, 3, [-0.01, -0.02, -0.03, 1.96, 0, 0]),  # default: KL on the sampled tokens, score on the last
        (5, 4, [-0.01, -0.02, -0.03, -0.04, 1.95, 0]),  # deepspeed_chat: one slot further, both
    ],
)
def test_rewards_of_worked_case_a(kl_slots, score_slot, expected):
    delta = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]])
    rewards = compute_rewards(
        delta, 0.1, first_positions(torch.tensor([kl_slots]), 6), torch.tensor([2.0]), torch.tensor([score_slot])
    )
    assert rewards[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_rewards_of_a_batch_by_hand():
    kl = torch.tensor([[1.0, -2.0, float("nan")], [0.5, 0.0, 4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    before = kl.clone()
    rewards = compute_rewards(kl, 0.5, mask, torch.tensor([3.0, -1.0]), torch.tensor([1, 2]))
    assert rewards.tolist() == [[-0.5, 4.0, 0.0], [-0.25, 0.0, -3.0]]  # -0.5 x -2 + 3; -0.5 x 4 - 1
    assert torch.equal(kl.nan_to_num(), before.nan_to_num())
