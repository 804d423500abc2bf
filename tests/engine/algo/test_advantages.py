"""GAE by hand, by its reductions, and against its definition as a double sum; groups and returns to go by hand."""

import numpy as np
import pytest
import torch

from engine.algo.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    gae,
    group_advantages,
    group_deviations,
    group_means,
    length_adaptive_lambda,
    returns_to_go,
    rloo,
)

RNG = np.random.default_rng(0)
REWARDS = torch.tensor(RNG.normal(size=(4, 9)), dtype=torch.float32)
VALUES = torch.tensor(RNG.normal(size=(4, 9)), dtype=torch.float32)


def double_sum(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> np.ndarray:
    """A_t = sum over l of (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}), in float64."""
    r, v = rewards.double().tolist(), values.double().tolist()
    result = np.zeros(tuple(rewards.shape))
    for row in range(len(r)):
        width = len(r[row])
        for t in range(width):
            for step in range(width - t):
                following = v[row][t + step + 1] if t + step + 1 < width else 0.0
                error = r[row][t + step] + gamma * following - v[row][t + step]
                result[row, t] += (gamma * lam) ** step * error
    return result


def test_by_hand():
    # gamma = lambda = 1/2. d: 1 + 1/2 x 1 - 0.5 = 1; 2 + 1/2 x 1.5 - 1 = 1.75; 3 - 1.5 = 1.5.
    # A: 1.5; 1.75 + 1.5 / 4 = 2.125; 1 + 2.125 / 4 = 1.53125.
    advantages, returns = gae(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 1.0, 1.5]]), 0.5, 0.5)
    assert advantages.tolist() == [[1.53125, 2.125, 1.5]]
    assert returns.tolist() == [[2.03125, 3.125, 3.0]]


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.99, 0.9), (0.7, 0.3), (1.0, 1.0), (0.9, 0.0)])
def test_against_the_double_sum(gamma, lam):
    advantages, returns = gae(REWARDS, VALUES, gamma, lam)
    expected = double_sum(REWARDS, VALUES, gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(returns.numpy(), expected + VALUES.double().numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("lam", [0.95, torch.tensor([0.9, 0.0, 1.0, 0.3])])
def test_every_step_is_rounded_to_float32_as_torch_rounds_it(lam):
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 300, generator=draw)
    rewards[1, 200], rewards[2, 100], rewards[2, 90] = torch.nan, torch.inf, -torch.inf
    given, expected, following = rewards.clone(), torch.empty(4, 300), torch.zeros(2, 4)
    for t in reversed(range(300)):
        advantage = rewards[:, t] + 0.99 * following[1] - values[:, t] + 0.99 * lam * following[0]
        following = torch.stack([advantage, values[:, t]])
        expected[:, t] = advantage
    torch.testing.assert_close(gae(rewards, values, 0.99, lam)[0], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rewards.nan_to_num(), given.nan_to_num())


@pytest.mark.parametrize("more", [1, 6])
def test_wider_padding_changes_nothing(more):
    padded = gae(*(torch.nn.functional.pad(part, (0, more)) for part in (REWARDS, VALUES)), 1.0, 0.95)
    for wide, narrow in zip(padded, gae(REWARDS, VALUES, 1.0, 0.95)):
        assert torch.equal(wide[:, :9], narrow) and not wide[:, 9:].any()


def test_rloo_by_hand():
    # 1 2 6: less 4, 3.5, 1.5. 0 3 0: less 1.5, 0, 1.5.
    advantages = rloo(torch.tensor([1.0, 2.0, 6.0, 0.0, 3.0, 0.0]), 3)
    assert advantages.tolist() == [-3.0, -1.5, 4.5, -1.5, 3.0, -1.5]


def test_rloo_counts_valid_responses_alone():
    rewards = torch.tensor([1.0, float("nan"), 6.0, 5.0, 7.0, 9.0, 2.0, 3.0, 4.0])
    valid = torch.tensor([True, False, True, True, False, False, False, False, False])
    # 1 and 6 are compared with each other; 5 has nobody; the last group is empty
    assert rloo(rewards, 3, valid).tolist() == [-5.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_rloo_needs_groups():
    with pytest.raises(ValueError, match="4 responses in groups of 1"):
        rloo(torch.zeros(4), 1)
    with pytest.raises(ValueError, match="4 responses in groups of 3"):
        rloo(torch.zeros(4), 3)


def test_groups_means_and_deviations_by_hand():
    # 1 2 6: mean 3, squares 4 1 9 = 14. 2 2 2: equal.
    rewards = torch.tensor([1.0, 2.0, 6.0, 2.0, 2.0, 2.0])
    assert group_means(rewards, 3).tolist() == [3.0, 3.0, 3.0, 2.0, 2.0, 2.0]
    assert group_advantages(rewards, 3).tolist() == [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]
    assert group_deviations(rewards, 3).tolist() == pytest.approx([7**0.5] * 3 + [0.0] * 3)
    assert group_deviations(rewards, 3, unbiased=False).tolist() == pytest.approx([(14 / 3) ** 0.5] * 3 + [0.0] * 3)


@pytest.mark.parametrize("group", [3, 8, 64])
@pytest.mark.parametrize("reward", [5.3, 0.7, -3.3, 100.1])
def test_equal_rewards_are_exactly_their_mean(group, reward):
    # Added up in float32 the mean of 8 times 5.3 is off by a digit, and so is the deviation: their ratio would be 1.
    rewards = torch.full((group,), reward)
    valid = torch.arange(group) != 1
    for counted in (None, valid):
        assert group_advantages(rewards, group, counted).tolist() == [0.0] * group
        assert group_deviations(rewards, group, counted).tolist() == [0.0] * group
        assert rloo(rewards, group, counted).tolist() == [0.0] * group
        assert (rewards - group_means(rewards, group, counted)).tolist() == [0.0] * group


def test_groups_of_valid_responses_alone():
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, 6.0, 5.0, 7.0, nan, 2.0, 3.0, 4.0])
    valid = torch.tensor([True, False, True, True, False, False, False, False, False])
    assert group_means(rewards, 3, valid).tolist() == [3.5, 3.5, 3.5, 5.0, 5.0, 5.0, 0.0, 0.0, 0.0]
    assert group_advantages(rewards, 3, valid).tolist() == [-2.5, 0.0, 2.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    # 2 x 6.25 over 1, or over 2
    assert group_deviations(rewards, 3, valid).tolist() == pytest.approx([12.5**0.5] * 3 + [0.0] * 6)
    assert group_deviations(rewards, 3, valid, unbiased=False).tolist() == pytest.approx([2.5] * 3 + [0.0] * 6)
    changed = {"rewards": rewards.unsqueeze(-1), "valid": valid, "group_size": 3}
    advantages, _ = estimated("reinforce_baseline", **changed)
    assert advantages[valid].flatten().tolist() == [-2.5, 2.5, 0.0]


@pytest.mark.parametrize("function", [group_means, group_advantages, group_deviations])
def test_groups_are_of_two_or_more(function):
    with pytest.raises(ValueError, match="GRPO of 4 responses in groups of 3: groups are of 2 or more"):
        function(torch.zeros(4), 3)
    with pytest.raises(ValueError, match="4 responses in groups of 1"):
        function(torch.zeros(4), 1)


def test_returns_to_go_by_hand_and_as_gae_without_values():
    rewards = torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, 0.0]])
    assert returns_to_go(rewards, 0.5).tolist() == [[3.0, 4.0, 4.0], [8.0, 0.0, 0.0]]
    assert returns_to_go(rewards, 1.0).tolist() == [[7.0, 6.0, 4.0], [8.0, 0.0, 0.0]]
    whole, _ = gae(REWARDS, torch.zeros_like(REWARDS), 0.9, 1.0)
    torch.testing.assert_close(returns_to_go(REWARDS, 0.9), whole, rtol=0, atol=1e-5)


def estimated(estimator: str = "gae", **changed) -> list[np.ndarray]:
    """Its advantages and returns of responses of 9, 9, 4 and 1 tokens; rewards and values are 0 behind them."""
    mask = torch.arange(9) < torch.tensor([9, 9, 4, 1]).unsqueeze(-1)
    given = {"policy_mask": mask, "valid": mask.any(-1), "group_size": 1, "gamma": 0.9, "lam": 0.6}
    inputs = AdvantageInputs(**{"rewards": REWARDS * mask, "values": VALUES * mask, **given, **changed})
    return [column.double().numpy() for column in ESTIMATORS[estimator].compute(inputs)]


def test_decoupled_lambdas_are_two_estimates():
    mask = np.arange(9) < np.array([[9], [9], [4], [1]])
    rewards, values = REWARDS * torch.tensor(mask), VALUES * torch.tensor(mask)
    advantages, returns = estimated(value_lam=1.0)
    np.testing.assert_allclose(advantages, double_sum(rewards, values, 0.9, 0.6), rtol=0, atol=1e-5)
    to_come = double_sum(rewards, 0 * values, 0.9, 1.0)  # with lambda 1 no value is left in a return
    np.testing.assert_allclose(returns, to_come, rtol=0, atol=1e-5)
    np.testing.assert_allclose(returns_to_go(rewards, 0.9).double().numpy(), to_come, rtol=0, atol=1e-5)
    assert np.abs(returns - advantages - values.double().numpy()).max() > 0.1


def test_lambda_by_length_by_hand():
    # 1 - 1 / (1/2 x 8) = 3/4; 1 - 1 / (1/2 x 4) = 1/2; 1 - 1 / (1/2 x 2) = 0, and no less for one token or none.
    assert length_adaptive_lambda(torch.tensor([8, 4, 2, 1, 0]), 0.5).tolist() == [0.75, 0.5, 0.0, 0.0, 0.0]


def test_each_response_has_the_lambda_of_its_length():
    mask = torch.arange(9) < torch.tensor([9, 9, 4, 1]).unsqueeze(-1)
    rewards, values = REWARDS * mask, VALUES * mask
    advantages, returns = estimated(length_adaptive_alpha=0.5)
    lams = [1 - 1 / 4.5, 1 - 1 / 4.5, 1 - 1 / 2, 0.0]
    for row, lam in enumerate(lams):
        one = double_sum(rewards[row : row + 1], values[row : row + 1], 0.9, lam)
        np.testing.assert_allclose(advantages[row : row + 1], one, rtol=0, atol=1e-5)
    expected = double_sum(rewards, values, 0.9, 0.6) + values.double().numpy()  # the critic learns with `lam`
    np.testing.assert_allclose(returns, expected, rtol=0, atol=1e-5)
