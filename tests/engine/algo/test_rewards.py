"""Which position receives the score, how long a response is, and the rewards of the worked case; what becomes of
scores, by hand and against NumPy; what long responses lose, and which groups have no difference in their scores.

A: three tokens, EOS, two pads, pad differs from EOS. B: the same with pad equal to EOS. C: six tokens, no EOS.
"""

import math

import numpy as np
import pytest
import torch

from engine.algo.masked import moments
from engine.algo.rewards import (
    ScoreScale,
    apply_missing_end,
    at_drawn_tokens,
    clip_scores,
    counted_tokens,
    first_positions,
    groups_alike,
    last_positions,
    likelihood_part,
    mean_logprobs,
    overlong_penalties,
    positions_up_to,
    score_positions,
    token_rewards,
)

EOS, PAD = 2, 9
SAMPLED_4, SAMPLED_6 = [True] * 4 + [False] * 2, [True] * 6
CASES = {  # tokens, response mask, pad token
    "A": ([11, 12, 13, EOS, PAD, PAD], SAMPLED_4, PAD),
    "B": ([11, 12, 13, EOS, EOS, EOS], SAMPLED_4, EOS),
    "C": ([11, 12, 13, 14, 15, 16], SAMPLED_6, PAD),
}


def counted_lengths(responses: torch.Tensor, mask: torch.Tensor, pad: int, rule: str) -> torch.Tensor:
    """L of each row."""
    return counted_tokens(responses, mask, pad, rule).sum(-1)


def test_lengths_of_a_ragged_batch():
    responses = torch.tensor([[5, EOS, 9, 9], [5, 6, 7, 8], [EOS, 9, 9, 9], [5, 6, 7, EOS]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert counted_lengths(responses, mask, PAD, "sampled").tolist() == [2, 4, 1, 4]
    assert counted_lengths(responses, mask, PAD, "before_pad").tolist() == [2, 4, 1, 4]
    responses[responses == PAD] = EOS  # pad == eos: EOS itself no longer counts before the first pad
    assert counted_lengths(responses, mask, EOS, "sampled").tolist() == [2, 4, 1, 4]
    assert counted_lengths(responses, mask, EOS, "before_pad").tolist() == [1, 4, 0, 3]


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


def test_positions_stay_within_the_row():
    lengths = torch.tensor([0, 1, 3, 4])
    assert score_positions(lengths, 4, "last").tolist() == [0, 0, 2, 3]
    assert score_positions(lengths, 4, "after_last").tolist() == [0, 1, 3, 3]
    assert score_positions(lengths, 4, "two_after").tolist() == [1, 2, 3, 3]


def test_first_positions():
    assert first_positions(torch.tensor([0, 2, 3, 7]), 3).int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]


def test_positions_up_to_and_past_the_response():
    lengths = torch.tensor([1, 3, 4])
    assert positions_up_to(lengths, 4, "response").sum(-1).tolist() == [1, 3, 4]
    assert positions_up_to(lengths, 4, "one_past").sum(-1).tolist() == [2, 4, 4]
    assert positions_up_to(lengths, 4, "two_past").sum(-1).tolist() == [3, 4, 4]
    assert positions_up_to(lengths, 4, "all").all()


def test_rewards_of_a_batch_by_hand():
    kl = torch.tensor([[1.0, -2.0, float("nan")], [0.5, 0.0, 4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    before = kl.clone()
    rewards = token_rewards(kl, 0.5, mask, torch.tensor([3.0, -1.0]), torch.tensor([1, 2]))
    assert rewards.tolist() == [[-0.5, 4.0, 0.0], [-0.25, 0.0, -3.0]]  # -0.5 x -2 + 3; -0.5 x 4 - 1
    assert torch.equal(kl.nan_to_num(), before.nan_to_num())


SCORES, ENDED = torch.tensor([3.0, -2.0, 0.5]), torch.tensor([True, False, False])


def test_missing_ends_by_hand():
    assert apply_missing_end(SCORES, ENDED, "none", 7.0).tolist() == [3.0, -2.0, 0.5]
    assert apply_missing_end(SCORES, ENDED, "replace", -1.0).tolist() == [3.0, -1.0, -1.0]
    assert apply_missing_end(SCORES, ENDED, "subtract", 1.0).tolist() == [3.0, -3.0, -0.5]
    assert SCORES.tolist() == [3.0, -2.0, 0.5]
    with pytest.raises(ValueError, match="'add': known are none, replace, subtract"):
        apply_missing_end(SCORES, ENDED, "add", 1.0)


def test_clipping():
    assert clip_scores(SCORES, 1.0).tolist() == [1.0, -1.0, 0.5]
    assert clip_scores(SCORES, None) is SCORES


def totals(values) -> torch.Tensor:
    tensor = torch.tensor(values)
    return moments(tensor, torch.ones_like(tensor, dtype=torch.bool))


BATCHES = [np.random.default_rng(seed).normal(40.0 + seed, 1.0 + seed, 5) for seed in range(4)]


def test_the_running_deviation_is_that_of_all_scores_so_far():
    scale = ScoreScale("running")
    for count in range(1, 5):
        scale.update(totals(BATCHES[count - 1]))
        assert scale.value == pytest.approx(np.concatenate(BATCHES[:count]).std(ddof=1), rel=1e-9)


def test_the_first_batchs_deviation_stays():
    scale = ScoreScale("first_batch")
    for batch in BATCHES:
        scale.update(totals(batch))
        assert scale.value == pytest.approx(BATCHES[0].std(ddof=1), rel=1e-9)


def test_none_divides_by_1():
    scale = ScoreScale()
    scale.update(totals(BATCHES[0]))
    assert scale.value == 1.0


@pytest.mark.parametrize("first", [[], [5.0], [2.0, 2.0, 2.0], [0.1] * 73])
def test_a_deviation_that_is_not_there_divides_by_1(first):
    scale = ScoreScale("running")
    scale.update(totals(first))
    assert scale.value == 1.0


@pytest.mark.parametrize("kind", ["running", "first_batch"])
def test_statistics_survive_a_restart(kind):
    one, two = ScoreScale(kind), ScoreScale(kind)
    one.update(totals(BATCHES[0]))
    two.load_state_dict(one.state_dict())
    for scale in (one, two):
        scale.update(totals(BATCHES[1]))
    assert one.value == two.value != 1.0


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'ref': known are none, running, first_batch"):
        ScoreScale("ref")


def test_penalties_of_length_by_hand():
    # L_max 20, L_cache 0.2 x 20 = 4: nothing up to 16 tokens, then a quarter with each, -1 from 20 on.
    lengths = torch.tensor([1, 15, 16, 17, 18, 19, 20, 25])
    expected = [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]
    assert overlong_penalties(lengths, 20, 0.2, 1.0).tolist() == pytest.approx(expected, abs=1e-6)
    assert overlong_penalties(lengths, 20, 0.2, 0.5).tolist() == pytest.approx([e / 2 for e in expected], abs=1e-6)
    assert overlong_penalties(lengths, 20, 0.2, 1.0).dtype == torch.float32


def test_penalties_of_length_as_the_paper_and_verl_write_them():
    longest, cache = 20480, 4096

    def paper(length: int) -> float:  # eq. 13
        if length <= longest - cache:
            return 0.0
        return ((longest - cache) - length) / cache if length <= longest else -1.0

    def verl(length: int, factor: float) -> float:  # verl/workers/reward_manager/dapo.py
        exceeding = length - (longest - cache)
        return min(-exceeding / cache * factor, 0)

    lengths = [1, 16383, 16384, 16385, 17000, 20000, 20479, 20480]
    given = torch.tensor(lengths)
    assert overlong_penalties(given, longest, 0.2, 1.0).tolist() == pytest.approx(list(map(paper, lengths)), abs=1e-6)
    factored = overlong_penalties(given, longest, 0.2, 2.5).tolist()
    assert factored == pytest.approx([verl(length, 2.5) for length in lengths], abs=1e-6)


def test_the_likelihoods_part_by_hand():
    nan = float("nan")
    logprobs = torch.tensor([[-1.0, -3.0, nan], [nan, -4.0, -6.0], [-9.0, -9.0, -9.0]])
    drawn = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])
    assert mean_logprobs(logprobs, drawn).tolist() == [-2.0, -5.0, 0.0]
    # 2, 0, -2 and -76 deviations from the mean; the cap holds the first one, nothing the last
    part = likelihood_part(torch.tensor([-1.0, -2.0, -3.0, -40.0]), mean=-2.0, deviation=0.5, coef=0.5, cap=1.0)
    assert part.tolist() == [0.5, 0.0, -1.0, -38.0] and part.dtype == torch.float32


def test_which_groups_are_alike():
    nan, inf = math.nan, math.inf
    groups = [[1, 1, 1], [0, 0, 1], [0.1 + 0.2, 0.3, 0.3], [-2, -2, -2], [nan, nan, nan], [1, 1, nan], [inf, inf, inf]]
    scores = torch.tensor(groups, dtype=torch.float64).flatten()
    assert groups_alike(scores, 3).tolist() == [True, False, False, True, False, False, False]
    assert groups_alike(torch.tensor([5.0, 5.0]), 1).tolist() == [True, True]


def test_numbers_of_inserted_tokens_move_to_drawn_ones():
    numbers = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]]).expand(4, 5)
    drawn = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
    expected = [[3, 0, 28, 0, 0], [0, 0, 7, 24, 0], [1, 2, 4, 8, 16], [0, 0, 0, 0, 31]]
    assert at_drawn_tokens(numbers, drawn).tolist() == expected
    assert last_positions(drawn).tolist() == [2, 3, 4, 4] and last_positions(~drawn).tolist() == [4, 4, 0, 3]
