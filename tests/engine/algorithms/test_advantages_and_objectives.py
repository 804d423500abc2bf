"""Advantages and objectives of dialects: whitening, groups, controllers, by hand."""

import dataclasses

import pytest
import torch

from engine.algo.kl import AdaptiveKL, FixedKL
from engine.algorithms import Dialect, get_dialect
from engine.experience import Masks
from tests.engine.algorithms.test_algorithm import algorithm, positions_of

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
    row = whitened(plain(whiten_slots="row"))
    assert row[0] == pytest.approx([-root / 3, -4 * root / 3, 11 * root / 3], abs=1e-5)
    assert row[1] == pytest.approx([2 * root / 3, -4 * root / 3, -4 * root / 3], abs=1e-5)


def test_the_padded_row_ends_with_the_longest_response_of_the_rows_given():
    state = torch.tensor([[True, True, False], [True, False, False]])
    masks = Masks(state, state, state)
    values, _ = algorithm(plain(whiten_slots="row")).compute_advantages(
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


def test_rewards_without_a_critic():
    positions = positions_of("trl_rloo", "A", 6)
    logprobs, ref_logprobs = torch.full((1, 6), -1.0), torch.full((1, 6), -1.5)
    rewards = algorithm(RLOO).compute_rewards(logprobs, ref_logprobs, torch.tensor([2.0]), positions, 0.1)
    values = algorithm(RLOO).kept_values(None, positions)
    assert rewards.sum().item() == pytest.approx(2 - 0.1 * 4 * 0.5) and not values.any()


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


def test_controllers():
    adaptive = algorithm("openai").kl_controller()
    assert isinstance(adaptive, AdaptiveKL)
    adaptive.update(3.0, 512)
    assert adaptive.value == pytest.approx(0.148464, abs=1e-12)  # the published number
    assert isinstance(algorithm("trlx").kl_controller(), FixedKL)
    aimed = dataclasses.replace(get_dialect("trlx"), kl_controller="adaptive", kl_target=3.0)
    assert (algorithm(aimed).kl_controller().target, algorithm(aimed).kl_controller().horizon) == (3.0, 10000.0)
