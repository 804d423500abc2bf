"""What losses have beyond PPO's: two clip ranges, a dual clip, geometric means of ratios, means of responses' means."""

import math

import pytest
import torch

from engine.algo.losses import (
    kl_loss,
    loss_weights,
    masked_log_ratios,
    policy_loss,
    response_log_ratios,
    response_policy_loss,
    shares_of_responses,
)
from tests.algo.test_losses import INF, NAN, everywhere, row

RATIOS = row(1.5, 0.5, 1.5, 0.5, 3.0)
ADVANTAGES = row(1, 1, -1, -1, -1)


def surrogate(**options):
    """The loss of each ratio by itself, and its gradient with respect to the log-prob."""
    new = RATIOS.log().requires_grad_()
    terms = [
        policy_loss(new[:, [i]], torch.zeros(1, 1), ADVANTAGES[:, [i]], everywhere(row(0)), 0.2, **options)
        for i in range(5)
    ]
    sum(term.loss for term in terms).backward()
    return [term.loss.item() for term in terms], new.grad[0].tolist()


def test_a_higher_clip_upwards_by_hand():
    # 1.5 counts as 1.4 where the advantage is positive; the other four sides are as with one range.
    losses, gradient = surrogate(clip_range_high=0.4)
    assert losses == pytest.approx([-1.4, -0.5, 1.5, 0.8, 3.0], abs=1e-6)
    assert gradient == pytest.approx([0.0, -0.5, 1.5, 0.0, 3.0], abs=1e-6)
    losses, gradient = surrogate(clip_range_high=0.6)
    assert losses[0] == pytest.approx(-1.5, abs=1e-6) and gradient[0] == pytest.approx(-1.5, abs=1e-6)
    assert surrogate(clip_range_high=0.2) == surrogate()


def test_a_dual_clip_bounds_what_a_negative_advantage_costs():
    losses, gradient = surrogate(dual_clip=2.0)
    assert losses == pytest.approx([-1.2, -0.5, 1.5, 0.8, 2.0], abs=1e-6)  # 3.0 counts as 2.0
    assert gradient == pytest.approx([0.0, -0.5, 1.5, 0.0, 0.0], abs=1e-6)
    new = torch.tensor([[3.0], [3.0]]).log()
    whole = response_policy_loss(new, 0 * new, torch.tensor([1.0, -1.0]), everywhere(new), 0.2, dual_clip=2.0)
    assert whole.loss.item() == pytest.approx(-1.2 + 2.0, abs=1e-6)


def test_the_geometric_mean_of_a_responses_ratios_by_hand():
    # Log ratios 0.1 and 0.3: their mean is 0.2; -0.5 alone; nothing; what is masked may be anything.
    new = torch.tensor([[0.1, 0.3, 9.0], [-0.5, NAN, INF], [1.0, 1.0, 1.0]]).requires_grad_()
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    old, advantages = torch.zeros(3, 3), torch.tensor([2.0, 3.0, 5.0])
    assert response_log_ratios(new, old, mask, mean=True).tolist() == pytest.approx([0.2, -0.5, 0.0])
    assert response_log_ratios(new, old, mask).tolist() == pytest.approx([0.4, -0.5, 0.0])
    assert masked_log_ratios(new, old, mask).tolist()[1] == pytest.approx([-0.5, 0.0, 0.0])
    sums = response_policy_loss(new, old, advantages, mask, 0.6, mean=True)
    assert sums.loss.item() == pytest.approx(-2 * math.exp(0.2) - 3 * math.exp(-0.5), abs=1e-5) and sums.count == 2
    sums.loss.backward()  # each of n tokens gets -A rho / n
    expected = [[-math.exp(0.2)] * 2 + [0.0], [-3 * math.exp(-0.5), 0.0, 0.0], [0.0] * 3]
    torch.testing.assert_close(new.grad, torch.tensor(expected), rtol=0, atol=1e-5)
    near = response_policy_loss(new, old, advantages, mask, 0.1, clip_range_high=0.15, mean=True)
    assert near.loss.item() == pytest.approx(-2 * 1.15 - 3 * math.exp(-0.5), abs=1e-5) and near.clipped == 1


def test_shares_make_a_sum_of_the_responses_means():
    # Ratios 1: losses are -A. Means of -1 -2 -3, of -4, of none.
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    advantages, zeros = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, 9.0], [7.0, 7.0, 7.0]]), torch.zeros(3, 3)
    assert shares_of_responses(mask).tolist() == [[pytest.approx(1 / 3)], [1.0], [1.0]]
    sums = policy_loss(zeros, zeros, advantages, mask, 0.2, weights=shares_of_responses(mask))
    assert sums.loss.item() == pytest.approx(-2.0 - 4.0) and (sums.count, sums.ratio) == (4, 4)
    correction = torch.tensor([[0.5, 1.0, 2.0], [3.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    both = policy_loss(zeros, zeros, advantages, mask, 0.2, correction, weights=shares_of_responses(mask))
    assert both.loss.item() == pytest.approx(-(0.5 + 2.0 + 6.0) / 3 - 12.0, abs=1e-6)


def test_a_penalty_times_the_ratio_has_the_kls_own_gradient_by_hand():
    # delta 0.5 and ratio 2: k3 = e^-0.5 - 0.5; its gradient (1 - e^-0.5) x 2 + k3 x 2 = 2 x delta, the KL's.
    new = torch.tensor([[0.5, NAN]]).requires_grad_()
    mask = torch.tensor([[True, False]])
    ratio = masked_log_ratios(new, torch.tensor([[0.5 - math.log(2), 0.0]]), mask).exp()
    penalty = kl_loss(new, torch.zeros(1, 2), mask, "k3", ratio=ratio, weights=torch.tensor([[0.25]]))
    penalty.backward()
    assert penalty.item() == pytest.approx(0.25 * 2 * (math.exp(-0.5) - 0.5), abs=1e-6)
    assert new.grad[0].tolist() == pytest.approx([0.25 * 2 * 0.5, 0.0], abs=1e-6)


@pytest.mark.parametrize("scope", ["response", "fixed_length"])
def test_weights_of_micro_batches_are_the_whole_steps(scope):
    assert loss_weights([3, 1, 0], 8, 4, 2, scope) == [1 / 8] * 3
    assert loss_weights([0], 0, 1, 1, scope) == [1.0]
