"""Each dialect's positions, masks, rewards, advantages and objectives: the tables of the reference systems, literally,
and by hand; and what a pad token that was sampled changes.

A: three tokens, EOS, two pads, pad differs from EOS. B: the same with pad equal to EOS. C: six tokens, no EOS.

deepspeed_chat: microsoft/DeepSpeedExamples 83757d9c, dschat/rlhf/ppo_trainer.py: attention_mask = seq != pad,
action_mask = attention_mask[:, 1:], ends = start + action_mask[:, start:].sum(1) + 1.
deepspeed_chat_2023: 1d17cf7c, the same without the + 1. trlx: CarperAI/trlx 3340c2f3, `make_experience` and `loss`:
attention_mask = tokens != pad, ends = start + attention_mask[:, start:].sum(1) + 1 from the last prompt token on.
trl_ppo, summarize: `first_true_indices(response == pad) - 1` is the last token that counts.
"""

import dataclasses

import pytest
import torch

from engine.algo.kl import AdaptiveKL, FixedKL
from engine.algorithms import Algorithm, Dialect, get_dialect
from engine.experience import Masks

EOS, PAD = 2, 9
CASES = {  # tokens, sampled ones, pad token
    "A": ([11, 12, 13, EOS, PAD, PAD], 4, PAD),
    "B": ([11, 12, 13, EOS, EOS, EOS], 4, EOS),
    "C": ([11, 12, 13, 14, 15, 16], 6, PAD),
}
# Case and width: the position that receives the score.
SCORE_SLOTS = {
    "openai": {"A6": 5, "A5": 4, "A4": 3, "B6": 5, "B5": 4, "B4": 3, "C6": 5, "C5": 4, "C4": 3},
    "deepspeed_chat": {"A6": 4, "A5": 4, "A4": 3, "B6": 3, "B5": 3, "B4": 3, "C6": 5, "C5": 4, "C4": 3},
    "deepspeed_chat_2023": {"A6": 3, "A5": 3, "A4": 3, "B6": 2, "B5": 2, "B4": 2, "C6": 5, "C5": 4, "C4": 3},
    "trlx": {"A6": 5, "A5": 4, "A4": 3, "B6": 4, "B5": 4, "B4": 3, "C6": 5, "C5": 4, "C4": 3},
    "trl_ppo": {"A6": 4, "A5": 4, "A4": 3, "B6": 3, "B5": 3, "B4": 3, "C6": 5, "C5": 4, "C4": 3},
    "summarize": {"A6": 4, "A5": 4, "A4": 3, "B6": 3, "B5": 3, "B4": 3, "C6": 5, "C5": 4, "C4": 3},
    "default": {"A6": 3, "A5": 3, "A4": 3, "B6": 3, "B5": 3, "B4": 3, "C6": 5, "C5": 4, "C4": 3},
}
# Slots of the policy's loss, L, and of the critic's; those of A, B and C at width 6, 5, 4.
L_OF = {
    "openai": {"A": (6, 5, 4), "B": (6, 5, 4), "C": (6, 5, 4)},
    "default": {"A": (4, 4, 4), "B": (4, 4, 4), "C": (6, 5, 4)},
    "others": {"A": (4, 4, 4), "B": (3, 3, 3), "C": (6, 5, 4)},
}
VALUE_OF = {"summarize": {"A": (5, 5, 4), "B": (4, 4, 4), "C": (6, 5, 4)}}
VALUE_OF["trl_ppo"] = VALUE_OF["summarize"]


def algorithm(dialect: Dialect | str, pad: int = PAD, end: int = EOS, **more) -> Algorithm:
    """The algorithm of a dialect, or of the one of this name; `more`: reduce, ranks."""
    dialect = get_dialect(dialect) if isinstance(dialect, str) else dialect
    return Algorithm(dialect, pad_token_id=pad, end_token_id=end, **more)


def positions_of(system: str, case: str, width: int):
    tokens, sampled, pad = CASES[case]
    mask = torch.arange(width).unsqueeze(0) < sampled
    return algorithm(system, pad).positions(torch.tensor([tokens[:width]]), mask)


@pytest.mark.parametrize("width", [6, 5, 4])
@pytest.mark.parametrize("case", ["A", "B", "C"])
@pytest.mark.parametrize("system", list(SCORE_SLOTS))
def test_score_positions_and_loss_masks_of_the_table(system, case, width):
    positions = positions_of(system, case, width)
    learned = L_OF.get(system, L_OF["others"])[case][6 - width]
    valued = VALUE_OF[system][case][6 - width] if system in VALUE_OF else learned
    assert positions.score.tolist() == [SCORE_SLOTS[system][f"{case}{width}"]]
    assert positions.lengths.tolist() == [learned]
    assert positions.masks.policy.int().tolist() == [[1] * learned + [0] * (width - learned)]
    assert positions.masks.value.int().tolist() == [[1] * valued + [0] * (width - valued)]


# Worked case A: delta = 0.1 .. 0.6, V = 1 .. 6, beta 0.1, s = 2, gamma 1, lambda 0.95, no whitening.
NARROW = ([-0.01, -0.02, -0.03, 1.96], [1.0474, 0.0604, -0.968, -2.04])
TRL = ([-0.01, -0.02, -0.03, -0.04, 2, 0], [1.1760, 0.1958, -0.8255, -1.89, -3, 0])
WORKED = {
    "deepspeed_chat": ([-0.01, -0.02, -0.03, -0.04, 1.95, 0], [1.1353, 0.1529, -0.8706, -1.9375, -3.05, 0]),
    "deepspeed_chat_2023": (
        [-0.01, -0.02, -0.03, 1.96, -0.05, -0.06],
        [1.4189, 0.4515, -0.5563, -1.6066, -4.807, -6.06],
    ),
    "openai": ([-0.01, -0.02, -0.03, -0.04, -0.05, 1.94], [1.2517, 0.2755, -0.7416, -1.8017, -2.907, -4.06]),
    "trlx": ([-0.01, -0.02, -0.03, -0.04, -0.05, 2], [1.2982, 0.3244, -0.6901, -1.7475, -2.85, -4]),
    "trl_ppo": TRL,
    "summarize": TRL,
    "default": ([*NARROW[0], 0, 0], [*NARROW[1], 0, 0]),
}


def worked_rewards(system: str, width: int, **changed):
    dialect = get_dialect(system).override(whiten_advantages=False, whiten_rewards=False, **changed)
    positions = positions_of(system, "A", width)
    delta, values = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]), torch.tensor([[1.0, 2, 3, 4, 5, 6]])
    resolved = algorithm(dialect)
    logprobs, ref_logprobs = (delta - 1)[:, :width], torch.full((1, width), -1.0)
    rewards = resolved.compute_rewards(logprobs, ref_logprobs, torch.tensor([2.0]), positions, 0.1)
    kept = resolved.kept_values(values[:, :width], positions)
    return rewards, resolved.compute_advantages(rewards, kept, positions.masks), kept


@pytest.mark.parametrize("system", list(WORKED))
def test_worked_case_a(system):
    for width, (expected_rewards, expected) in ((6, WORKED[system]), (4, NARROW)):
        rewards, (advantages, returns), values = worked_rewards(system, width)
        assert rewards[0].tolist() == pytest.approx(expected_rewards, abs=1e-6)
        assert advantages[0].tolist() == pytest.approx(expected, abs=6e-5)
        torch.testing.assert_close(returns, advantages + values, rtol=0, atol=0)


def test_a_penalty_in_the_loss_is_not_in_the_reward():
    rewards, *_ = worked_rewards("default", 6, kl_in="loss")
    assert rewards.tolist() == [[0, 0, 0, 2, 0, 0]]


@pytest.mark.parametrize("estimator, last", [("k2", 2 - 0.1 * 0.08), ("k3", 2 - 0.1 * 0.0703200460)])
def test_the_estimator_in_the_reward(estimator, last):
    # delta 0.4: 0.4^2 / 2 = 0.08; e^-0.4 - 1 + 0.4 = 0.07032
    rewards, *_ = worked_rewards("default", 6, kl_estimator=estimator)
    assert rewards[0, 3].item() == pytest.approx(last, abs=1e-6)


def test_a_row_that_is_too_short_is_not_learned_but_keeps_its_score():
    tokens = torch.tensor([[11, PAD, PAD], [11, 12, PAD]])
    positions = algorithm("deepspeed_chat").positions(tokens, torch.tensor([[True, False, False], [True, True, False]]))
    assert positions.masks.policy.int().tolist() == positions.masks.value.int().tolist() == [[0, 0, 0], [1, 1, 0]]
    assert positions.score.tolist() == [1, 2]


def test_what_is_scored_ends_where_the_dialect_says():
    sampled = torch.tensor([[5, EOS, 7, EOS], [5, 6, 7, 8]])
    everywhere, nowhere = torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    mask, ended = algorithm("summarize").scored_text(sampled, everywhere, nowhere)
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]] and ended.tolist() == [True, False]
    mask, ended = algorithm("trl_ppo").scored_text(sampled, everywhere, nowhere)
    assert mask.all() and ended.tolist() == [True, False]
    late = get_dialect("openai").override(truncate_after=2)
    mask, ended = algorithm(late).scored_text(sampled, everywhere, nowhere)
    assert mask.all() and ended.tolist() == [True, False]
    mask, ended = algorithm(late, end=6).scored_text(
        sampled, everywhere, nowhere
    )  # there, but not at or after position 2
    assert mask.all() and ended.tolist() == [False, False]
    stops = torch.tensor([True, False])
    assert algorithm("default").scored_text(sampled, everywhere, stops)[1].tolist() == [True, False]
    padded = torch.tensor([[True, False, False, False], [True, True, True, True]])
    assert algorithm("trl_ppo").scored_text(sampled, padded, nowhere)[1].tolist() == [False, False]


SCORES, ENDED = torch.tensor([12.0, -20.0, 4.0, 8.0]), torch.tensor([True, True, True, False])


def test_scores_clipped_then_scaled_and_scaled_then_clipped():
    # trlx: 10 -10 4 8: mean 3, squares 49 169 1 25 = 244, deviation sqrt(244 / 3) = 9.018500
    trlx = get_dialect("trlx").override(score_scaling="running")
    resolved = algorithm(trlx)
    expected = [10 / 9.018500, -10 / 9.018500, 4 / 9.018500, 8 / 9.018500]
    assert resolved.process_scores(SCORES, ENDED).tolist() == pytest.approx(expected, abs=1e-5)
    assert resolved.score_scale.value == pytest.approx(9.018500, abs=1e-6)
    # default: 12 -20 4 8: mean 1, squares 121 441 9 49 = 620, deviation sqrt(620 / 3) = 14.375906; then at most 1
    default = Dialect(score_scaling="running", score_clip=1.0)
    expected = [12 / 14.375906, -1.0, 4 / 14.375906, 8 / 14.375906]
    resolved = algorithm(default)
    assert resolved.process_scores(SCORES, ENDED).tolist() == pytest.approx(expected, abs=1e-5)
    assert resolved.clipped(SCORES).tolist() == [False, True, False, False]
    assert algorithm(trlx).clipped(SCORES).tolist() == [True, True, False, False]  # before they are scaled
    assert algorithm(Dialect(score_clip=None)).clipped(SCORES) is None


def test_missing_ends_by_dialect():
    for system, expected in [
        ("openai", [12, -20, 4, -1]),
        ("summarize", [12, -20, 4, -1]),
        ("trl_ppo", [12, -20, 4, 8]),
        ("trlx", [10, -10, 4, 8]),
        ("deepspeed_chat", [5, -5, 4, 5]),
    ]:
        assert algorithm(system).process_scores(SCORES, ENDED).tolist() == expected
    lowered = get_dialect("trl_ppo").override(missing_end="subtract", missing_end_value=1.5)
    assert algorithm(lowered).process_scores(SCORES, ENDED).tolist() == [12, -20, 4, 6.5]
    clipped = Dialect(missing_end="replace", missing_end_value=-9.0)
    assert algorithm(clipped).process_scores(SCORES, ENDED).tolist() == [5, -5, 4, -5]


def test_scaling_takes_statistics_of_all_ranks():
    # This rank's four scores and another's: 0 and 3: mean 7 / 6, sum of squares 144 + 400 + 16 + 64 + 9 = 633
    def reduce(totals):
        return totals + torch.tensor([2.0, 3.0, 9.0], dtype=torch.float64)

    resolved = algorithm(Dialect(score_scaling="first_batch"), reduce=reduce)
    resolved.process_scores(SCORES, ENDED)
    assert resolved.score_scale.value == pytest.approx(((633 - 49 / 6) / 5) ** 0.5, rel=1e-9)


def test_the_likelihood_is_added_behind_the_clip_and_clipped_apart():
    # -1 -2 -3 -2: mean -2, deviation sqrt(2 / 3); 1.224745 0 -1.224745 0 deviations, at most 1, times 2
    first, later = torch.tensor([-1.0, -2.0, -3.0, -2.0]), torch.tensor([-12.0, -1.0, -2.0, -2.0])
    dialect = Dialect(likelihood_coef=2.0, missing_end="replace", missing_end_value=-1.0)
    resolved = algorithm(dialect)
    found = resolved.process_scores(SCORES, ENDED, likelihoods=first)
    assert found.tolist() == pytest.approx([5 + 2, -5, 4 - 2.449490, -1], abs=1e-5)
    # -10 of the first batch's deviations, which stay: 2 * -12.247449, at least -5
    assert resolved.process_scores(SCORES, ENDED, likelihoods=later).tolist() == pytest.approx([0, -3, 4, -1], abs=1e-5)
    assert resolved.clipped(SCORES).tolist() == [True, True, False, True], "the reward's scores alone"
    unclipped = algorithm(dialect.replaced(score_clip=None, likelihood_cap=0.5))
    unclipped.likelihood_scale = resolved.likelihood_scale
    assert unclipped.likelihood_part(later).tolist() == pytest.approx([-24.494897, 1, 0, 0], abs=1e-5)

    # Another rank's two, -3 and -4: mean -15 / 6, variance (43 - 6 * 6.25) / 5
    def reduce(totals):
        return totals + torch.tensor([2.0, -7.0, 25.0], dtype=torch.float64)

    resolved = algorithm(dialect, reduce=reduce)
    resolved.process_scores(SCORES, ENDED, likelihoods=first)
    assert resolved.likelihood_scale.mean == -2.5
    assert resolved.likelihood_scale.value == pytest.approx(1.1**0.5, rel=1e-12)


# Two rows, L = 3 and 1, T = 3: r 1 0 5 | 2 0 0, V 0, so that with lambda 0 the advantages are the rewards.
REWARDS = torch.tensor([[1.0, 0.0, 5.0], [2.0, 0.0, 0.0]])
THREE_AND_ONE = torch.tensor([[True, True, True], [True, False, False]])
WIDE = Masks(THREE_AND_ONE, THREE_AND_ONE, torch.ones(2, 3, dtype=torch.bool))


def plain(**changed) -> Dialect:
    return Dialect(**{"lam": 0.0, "gamma": 0.0, **changed})


def whitened(dialect: Dialect, **more) -> list:
    return algorithm(dialect, **more).compute_advantages(REWARDS, torch.zeros(2, 3), WIDE)[0].tolist()


def test_whitening_over_the_response_or_over_the_padded_row():
    # 1 0 5 2: mean 2, squares 1 4 9 0 = 14, variance 3.5 or, unbiased, 14 / 3
    root = 3.5**-0.5
    assert whitened(plain())[0] == pytest.approx([-root, -2 * root, 3 * root], abs=1e-5)
    assert whitened(plain())[1] == pytest.approx([0, 0, 0], abs=1e-5)
    root = (14 / 3) ** -0.5
    assert whitened(plain(whiten_variance="unbiased"))[0] == pytest.approx([-root, -2 * root, 3 * root], abs=1e-5)
    # 1 0 5 2 0 0: mean 4 / 3, squares 1 / 9 16 / 9 121 / 9 4 / 9 16 / 9 16 / 9 = 174 / 9, variance 174 / 54
    root = (54 / 174) ** 0.5
    row = whitened(plain(whiten_positions="row"))
    assert row[0] == pytest.approx([-root / 3, -4 * root / 3, 11 * root / 3], abs=1e-5)
    assert row[1] == pytest.approx([2 * root / 3, -4 * root / 3, -4 * root / 3], abs=1e-5)


def test_the_padded_row_ends_with_the_longest_response_of_the_rows_given():
    state = torch.tensor([[True, True, False], [True, False, False]])
    masks = Masks(state, state, state)
    values, _ = algorithm(plain(whiten_positions="row")).compute_advantages(
        torch.tensor([[1.0, 0.0, 0.0], [3.0, 0.0, 0.0]]), torch.zeros(2, 3), masks
    )
    # 1 0 3 0: mean 1, variance 1.5: the third column is nobody's
    assert values[0].tolist() == pytest.approx([0, -(1.5**-0.5), 0], abs=1e-5)
    assert values[1].tolist() == pytest.approx([2 * 1.5**-0.5, -(1.5**-0.5), 0], abs=1e-5)


def test_statistics_of_all_ranks_or_of_this_one():
    def reduce(totals):  # another rank holds the single advantage 10: together 1 0 5 2 10, mean 3.6, variance 13.04
        return totals + torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)

    root = 13.04**-0.5
    together = whitened(plain(), reduce=reduce, ranks=2)
    assert together[0] == pytest.approx([-2.6 * root, -3.6 * root, 1.4 * root], abs=1e-5)
    assert whitened(plain(whiten_over="rank"), reduce=reduce, ranks=2) == whitened(plain())
    alone = plain(whiten_variance="unbiased_alone")
    assert whitened(alone) == whitened(plain(whiten_variance="unbiased"))
    assert whitened(alone, reduce=reduce, ranks=2) == together


def test_whitened_rewards_keep_their_mean_and_give_the_returns():
    dialect = plain(whiten_rewards=True, whiten_advantages=False)
    advantages, returns = algorithm(dialect).compute_advantages(REWARDS, torch.zeros(2, 3), WIDE)
    root = 3.5**-0.5
    assert advantages[0].tolist() == pytest.approx([2 - root, 2 - 2 * root, 2 + 3 * root], abs=1e-5)
    assert advantages[1].tolist() == pytest.approx([2, 0, 0], abs=1e-5)
    assert torch.equal(advantages, returns)


RLOO = get_dialect("trl_rloo")


def test_rloo_compares_the_responses_to_one_prompt():
    # s' = 1 - 0.2 = 0.8, 3 + 0.1 = 3.1; the third and fourth 2 and 2.5
    rewards = torch.tensor([[-0.2, 1.0], [3.1, 0.0], [2.0, 0.0], [2.5, 0.0]])
    mask = torch.ones(4, 2, dtype=torch.bool)
    masks = Masks(mask, mask, mask)
    advantages, returns = algorithm(RLOO).compute_advantages(rewards, torch.zeros(4, 2), masks)
    for column in range(2):
        assert advantages[:, column].tolist() == pytest.approx([-2.3, 2.3, -0.5, 0.5], abs=1e-6)
        assert returns[:, column].tolist() == pytest.approx([0.8, 3.1, 2.0, 2.5], abs=1e-6)
    whitened_rloo = algorithm(RLOO.override(whiten_advantages=True, whiten_variance="biased"))
    white, _ = whitened_rloo.compute_advantages(rewards, torch.zeros(4, 2), masks)
    root = ((2 * 2.3**2 + 2 * 0.5**2) / 4) ** 0.5  # four numbers a statistic, not eight
    assert white[:, 0].tolist() == pytest.approx([-2.3 / root, 2.3 / root, -0.5 / root, 0.5 / root], abs=1e-5)


def test_a_response_without_a_token_is_compared_and_counted_where_all_lengths_are_learned():
    """TRL: its KL is 0 and its ratio 1, and the mean is over all responses. EOS, which pads too, comes first in it."""
    responses = torch.tensor([[2, 5, 6], [5, 6, 7], [5, 2, 2], [8, 9, 9]])
    everywhere, nowhere = torch.ones(4, 3, dtype=torch.bool), torch.zeros(4, 3)
    for dialect, expected, count in (
        (RLOO, [-2.0, 2.0, -3.0, 3.0], 4),
        (RLOO.override(min_response_tokens=1), [0.0, 0.0, -3.0, 3.0], 3),
    ):
        resolved = algorithm(dialect, pad=2)
        positions = resolved.positions(responses, everywhere)
        assert positions.lengths.tolist() == [0, 3, 1, 3]
        rewards = resolved.compute_rewards(nowhere, nowhere, torch.tensor([1.0, 3.0, 2.0, 5.0]), positions, 0.1)
        advantages, _ = resolved.compute_advantages(rewards, resolved.kept_values(None, positions), positions.masks)
        assert advantages[:, 0].tolist() == pytest.approx(expected)
        sums = resolved.losses.policy_loss(nowhere, nowhere, nowhere, advantages, positions.masks.policy, 0.1)
        assert sums.count.item() == sums.ratio.item() == count
        assert sums.loss.item() == pytest.approx(-sum(expected), abs=1e-6)


def test_losses_by_dialect():
    old, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    new = torch.tensor([[1.5, 0.5]]).log()
    advantages = torch.tensor([[2.0, 2.0]])
    token = algorithm("default").losses.policy_loss(new, old, old, advantages, mask, 0.3)
    assert token.loss.item() == pytest.approx(-2 * 1.2 - 2 * 0.5) and token.count.item() == 2
    whole = algorithm(RLOO).losses.policy_loss(new, old, old, advantages, mask, 0.3)
    assert whole.loss.item() == pytest.approx(-2 * 0.75)
    assert whole.count.item() == 1 and whole.ratio.item() == pytest.approx(0.75)
    in_loss = algorithm(Dialect(kl_in="loss", kl_estimator="k2"))
    penalized = in_loss.losses.policy_loss(new, old, old, advantages, mask, 0.3)
    squares = torch.tensor([1.5, 0.5]).log().square().sum().item() / 2
    assert penalized.loss.item() == pytest.approx(-3.4 + 0.3 * squares, abs=1e-6)
    # A correction is the surrogate's: -2.4 x 0.5 - 1 x 2, and the penalty as it was; the response's, where it has one.
    corrected = in_loss.losses.policy_loss(new, old, old, advantages, mask, 0.3, torch.tensor([[0.5, 2.0]]))
    assert corrected.loss.item() == pytest.approx(-3.2 + 0.3 * squares, abs=1e-6)
    response = algorithm(RLOO).losses.policy_loss(new, old, old, advantages, mask, 0.3, torch.full((1, 2), 0.5))
    assert response.loss.item() == pytest.approx(-0.75) and response.count.item() == 1
    values = algorithm("trl_ppo").losses.value_loss(
        torch.tensor([[1.0, 4.0]]), torch.zeros(1, 2), torch.tensor([[3.0, 3.0]]), mask
    )
    # near 0.2: (0.2 - 3)^2 = 7.84 over (1 - 3)^2, and over (4 - 3)^2
    assert values.loss.item() == pytest.approx(0.1 * 0.5 * 2 * 7.84, abs=1e-5) and values.count.item() == 2


@pytest.mark.parametrize(
    "dialect, entropies",
    [
        (Dialect(), (1.0 + 2.0 + 4.0) / 3),
        (Dialect(kl_in="loss"), (1.0 + 2.0 + 4.0) / 3),
        (Dialect(loss_scope="response"), ((1.0 + 2.0) / 2 + 4.0) / 2),
        (Dialect(loss_scope="fixed_length"), (1.0 + 2.0 + 4.0) / (2 * 5)),
        (RLOO, ((1.0 + 2.0) + 4.0) / 2),
        (get_dialect("gspo"), ((1.0 + 2.0) / 2 + 4.0) / 2),
    ],
)
def test_an_entropy_bonus_is_averaged_as_the_loss_is(dialect, entropies):
    """Entropies of 1 and 2 in one response and 4 in another; outside the mask they are not read."""
    mask = torch.tensor([[True, True], [True, False]])
    entropy = torch.tensor([[1.0, 2.0], [4.0, torch.nan]], requires_grad=True)
    losses = {}
    for coefficient in (0.0, 0.25):
        one = algorithm(dialect.override(entropy_coef=coefficient), max_response_length=5).losses
        given = torch.tensor([[-1.0, -2.0], [-0.5, torch.nan]]), torch.full((2, 2), -1.0), torch.full((2, 2), -1.5)
        sums = one.policy_loss(*given, torch.tensor([[1.0, 1.0], [-2.0, -2.0]]), mask, 0.1, entropy=entropy)
        losses[coefficient] = sums.loss / one.policy_count(mask)
    assert losses[0.0].item() - losses[0.25].item() == pytest.approx(0.25 * entropies, abs=1e-6)
    losses[0.25].backward()
    assert entropy.grad[1, 1] == 0 and (entropy.grad[mask] < 0).all()


def test_controllers():
    adaptive = algorithm("openai").kl_controller()
    assert isinstance(adaptive, AdaptiveKL)
    adaptive.update(3.0, 512)
    assert adaptive.value == pytest.approx(0.148464, abs=1e-12)  # the published number
    assert isinstance(algorithm("trlx").kl_controller(), FixedKL)
    aimed = dataclasses.replace(get_dialect("trlx"), kl_controller="adaptive", kl_target=3.0)
    assert (algorithm(aimed).kl_controller().target, algorithm(aimed).kl_controller().horizon) == (3.0, 10000.0)


P, WIDTH = 2, 7
ROW = [5, PAD, 6, EOS, PAD, PAD, PAD]  # four tokens sampled, one of them a pad


def by_counting(offset: int) -> tuple[list[int], int]:
    """The loss mask, and where the score goes: the last of the positions before `ends`."""
    sequence = torch.tensor([[11, 12, *ROW]])
    action_mask = (sequence != PAD).long()[:, 1:]
    start = P - 1
    ends = int(start + action_mask[0, start:].sum() + offset)
    return action_mask[0, start:].tolist(), list(range(start, len(action_mask[0])))[: ends - start][-1] - start


def of_trlx() -> tuple[list[int], int]:
    mask = (torch.tensor([11, 12, *ROW]) != PAD).long()
    start = P - 1
    ends = int(start + mask[start:].sum() + 1)
    positions = list(range(start, len(mask) - 1))[: ends - start]
    return mask[start + 1 :].tolist(), positions[-1] - start


def before_the_first(score_position: int) -> tuple[list[int], int]:
    length = ROW.index(PAD)
    return [1] * length + [0] * (WIDTH - length), length + score_position


EXPECTED = {
    "deepspeed_chat": by_counting(1),
    "deepspeed_chat_2023": by_counting(0),
    "trlx": of_trlx(),
    "trl_ppo": before_the_first(0),
    "summarize": before_the_first(0),
    "openai": ([1] * WIDTH, WIDTH - 1),
    "default": ([1, 1, 1, 1, 0, 0, 0], 3),
}


def test_the_formulas_by_hand():
    assert EXPECTED["deepspeed_chat"] == ([1, 0, 1, 1, 0, 0, 0], 3)
    assert EXPECTED["deepspeed_chat_2023"] == ([1, 0, 1, 1, 0, 0, 0], 2)
    assert EXPECTED["trlx"] == ([1, 0, 1, 1, 0, 0, 0], 4)
    assert EXPECTED["trl_ppo"] == ([1, 0, 0, 0, 0, 0, 0], 1)


@pytest.mark.parametrize("system", EXPECTED)
def test_masks_and_score_position(system):
    mask, place = EXPECTED[system]
    algorithm = Algorithm(get_dialect(system), pad_token_id=PAD, end_token_id=EOS)
    positions = algorithm.positions(torch.tensor([ROW]), torch.arange(WIDTH).unsqueeze(0) < 4)
    assert positions.masks.policy.int().tolist() == [mask]
    assert positions.score.tolist() == [place]
    same = torch.zeros(1, WIDTH)
    rewards = algorithm.compute_rewards(same, same, torch.tensor([2.0]), positions, 0.1)
    assert rewards.nonzero().tolist() == [[0, place]]
