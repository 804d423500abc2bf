"""Losses by hand, their gradients by finite differences, sums that add up where means do not; two clip ranges, a dual
clip, geometric means of ratios, means of responses' means; and the two guards at, below and above their limits.
"""

import math

import numpy as np
import pytest
import torch

from engine.algo.losses import (
    clipped_surrogate,
    clipped_value_loss,
    clipped_weight_loss,
    kl_loss,
    loss_weights,
    masked_log_ratios,
    pairwise_loss,
    pairwise_loss_from_difference,
    ratio_exploded,
    response_clipped_surrogate,
    response_log_ratios,
    shares_of_responses,
    soft_surrogate,
    went_too_far,
)

NAN, INF = float("nan"), float("inf")


def row(*values: float, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def everywhere(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tensor, dtype=torch.bool)


def finite_differences(function, point: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    gradient = torch.zeros_like(point)
    for index in np.ndindex(*point.shape):
        up, down = point.clone(), point.clone()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


def test_policy_loss_by_hand_on_all_four_sides():
    # A, ratio: plain, clipped at 0.8 and 1.2 -> the larger
    #  1, 1.5: -1.5, -1.2 -> -1.2 (clipped)        1, 0.5: -0.5, -0.8 -> -0.5
    # -1, 1.5:  1.5,  1.2 ->  1.5                 -1, 0.5:  0.5,  0.8 ->  0.8 (clipped)
    #  2, 1.1: -2.2, -2.2 -> -2.2, not clipped
    ratios, advantages = [1.5, 0.5, 1.5, 0.5, 1.1], row(1, 1, -1, -1, 2)
    old = row(-1, -2, -3, -4, -5)
    new = old + row(*ratios).log()
    sums = clipped_surrogate(new, old, advantages, everywhere(old), 0.2)
    assert sums.loss.item() == pytest.approx(-1.2 - 0.5 + 1.5 + 0.8 - 2.2, abs=1e-5)
    assert sums.clipped.item() == 2.0
    assert sums.approxkl.item() == pytest.approx(sum(math.log(ratio) ** 2 / 2 for ratio in ratios), abs=1e-5)
    assert sums.ratio.item() == pytest.approx(5.1, abs=1e-5)
    assert sums.ratio_max.item() == pytest.approx(1.5, abs=1e-6)


def test_the_policy_gradient_by_finite_differences():
    rng = np.random.default_rng(0)
    old, advantages = (torch.tensor(rng.normal(size=(3, 6))) for _ in range(2))
    new = old + torch.tensor(rng.uniform(-0.6, 0.6, (3, 6)))
    mask = torch.tensor(rng.random((3, 6)) < 0.7)
    point = new.clone().requires_grad_()
    sums = clipped_surrogate(point, old, advantages, mask, 0.2)
    sums.loss.backward()
    assert 0 < sums.clipped.item() < mask.sum()
    expected = finite_differences(lambda x: clipped_surrogate(x, old, advantages, mask, 0.2).loss.item(), new)
    torch.testing.assert_close(point.grad, expected, rtol=0, atol=1e-7)
    assert not point.grad[~mask].any()


def test_before_the_first_update_the_gradient_is_minus_the_advantage():
    rng = np.random.default_rng(1)
    old, advantages = (torch.tensor(rng.normal(size=(2, 5)), dtype=torch.float32) for _ in range(2))
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    new = old.clone().requires_grad_()
    sums = clipped_surrogate(new, old, advantages, mask, 0.2)
    (sums.loss / mask.sum()).backward()
    assert (sums.loss / 8).item() == pytest.approx(-advantages[mask].double().mean().item(), abs=1e-6)
    torch.testing.assert_close(new.grad, torch.where(mask, -advantages / 8, torch.zeros(2, 5)), rtol=0, atol=1e-7)
    assert sums.clipped.item() == 0 and sums.approxkl.item() == 0 and sums.ratio.item() == 8 and sums.ratio_max == 1


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e4])
def test_differences_outside_the_mask_are_harmless(poison):
    old, mask = row(-1, -2, -3), torch.tensor([[True, False, True]])
    new = row(-0.9, poison, -3.3).requires_grad_()
    sums = clipped_surrogate(new, old, row(0.5, NAN, -1), mask, 0.2)
    # -0.5 e^0.1; e^-0.3 = 0.7408 is cut to 0.8
    assert sums.loss.item() == pytest.approx(-0.5 * math.exp(0.1) + 0.8, abs=1e-6)
    assert sums.ratio_max.item() == pytest.approx(math.exp(0.1), abs=1e-6)
    assert sums.approxkl.item() == pytest.approx((0.01 + 0.09) / 2, abs=1e-6)
    assert sums.clipped.item() == 1
    sums.loss.backward()
    torch.testing.assert_close(new.grad, row(-0.5 * math.exp(0.1), 0.0, 0.0), rtol=0, atol=1e-6)


def test_an_empty_mask_gives_zeros():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    sums = clipped_surrogate(row(1, NAN), row(2, 3), row(1, 1), nothing, 0.2)
    assert [sums.loss, sums.clipped, sums.approxkl, sums.ratio, sums.ratio_max] == [0, 0, 0, 0, 0]
    sums = clipped_value_loss(row(1, 2), row(1, 2), row(3, 4), nothing, 0.2)
    assert [sums.loss, sums.clipped, sums.value] == [0, 0, 0]


def test_value_loss_by_hand_on_both_sides():
    # V0 = 1 throughout, clip 0.2. V, R: (V - R)^2, (near - R)^2 -> the larger
    # 1.1, 2: 0.81, 0.81 -> 0.81       1.5, 2: 0.25, 0.64 -> 0.64 (clipped)     0.5, 2: 2.25, 1.44 -> 2.25
    # 0.5, 0: 0.25, 0.64 -> 0.64 (clipped)    1.5, 0: 2.25, 1.44 -> 2.25         sum 6.59
    values = row(1.1, 1.5, 0.5, 0.5, 1.5)
    sums = clipped_value_loss(values, torch.ones(1, 5), row(2, 2, 2, 0, 0), everywhere(values), 0.2)
    assert sums.loss.item() == pytest.approx(6.59 / 2, abs=1e-5)
    assert sums.clipped.item() == 2.0
    assert sums.value.item() == pytest.approx(5.1, abs=1e-5) and sums.count.item() == 5
    tenth = clipped_value_loss(values, torch.ones(1, 5), row(2, 2, 2, 0, 0), everywhere(values), 0.2, factor=0.1)
    assert tenth.loss.item() == pytest.approx(0.659 / 2, abs=1e-6) and tenth.value.item() == sums.value.item()


def test_without_a_clip_range_the_value_loss_is_the_squared_error():
    # 0.81 + 0.25 + 2.25 + 0.25 + 2.25 = 5.81; the gradient is V - R everywhere
    values = row(1.1, 1.5, 0.5, 0.5, 1.5).requires_grad_()
    sums = clipped_value_loss(values, torch.ones(1, 5), row(2, 2, 2, 0, 0), everywhere(values), None)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(5.81 / 2, abs=1e-5) and sums.clipped.item() == 0
    torch.testing.assert_close(values.grad, row(-0.9, -0.5, -1.5, 0.5, 1.5), rtol=0, atol=1e-6)


def test_the_value_gradient_by_finite_differences():
    rng = np.random.default_rng(2)
    old, returns = (torch.tensor(rng.normal(size=(3, 6))) for _ in range(2))
    values = old + torch.tensor(rng.uniform(-0.6, 0.6, (3, 6)))
    mask = torch.tensor(rng.random((3, 6)) < 0.7)
    point = values.clone().requires_grad_()
    sums = clipped_value_loss(point, old, returns, mask, 0.2)
    sums.loss.backward()
    assert 0 < sums.clipped.item() < mask.sum()
    expected = finite_differences(lambda x: clipped_value_loss(x, old, returns, mask, 0.2).loss.item(), values)
    torch.testing.assert_close(point.grad, expected, rtol=0, atol=1e-7)


def test_sums_over_micro_batches_add_up_and_means_of_means_do_not():
    rng = np.random.default_rng(3)
    new, old, advantages, returns = (torch.tensor(rng.normal(size=(6, 8)), dtype=torch.float32) for _ in range(4))
    advantages[:1] += 3.0
    mask = torch.arange(8) < torch.tensor([1, 8, 5, 7, 8, 6]).unsqueeze(-1)
    pieces = [slice(0, 1), slice(1, 3), slice(3, 6)]
    for whole, parts in [
        (
            clipped_surrogate(new, old, advantages, mask, 0.2),
            [clipped_surrogate(new[p], old[p], advantages[p], mask[p], 0.2) for p in pieces],
        ),
        (
            clipped_value_loss(new, old, returns, mask, 0.2),
            [clipped_value_loss(new[p], old[p], returns[p], mask[p], 0.2) for p in pieces],
        ),
    ]:
        for name in type(whole).__slots__:
            if name != "ratio_max":
                total = sum(getattr(part, name).item() for part in parts)
                assert total == pytest.approx(getattr(whole, name).item(), rel=1e-5)
        mean_of_means = sum(part.loss.item() / mask[p].sum().item() for part, p in zip(parts, pieces)) / len(pieces)
        assert mean_of_means != pytest.approx(whole.loss.item() / mask.sum().item(), rel=0.1)
    ratios = [clipped_surrogate(new[p], old[p], advantages[p], mask[p], 0.2).ratio_max.item() for p in pieces]
    assert max(ratios) == clipped_surrogate(new, old, advantages, mask, 0.2).ratio_max.item()


def test_only_the_loss_carries_a_gradient():
    new, old = row(0.1, 0.2).requires_grad_(), row(0.0, 0.0)
    policy = clipped_surrogate(new, old, old + 1, everywhere(old), 0.2)
    for sums in (policy, clipped_value_loss(new, old, old, everywhere(old), 0.2)):
        assert sums.loss.requires_grad
        assert not any(getattr(sums, name).requires_grad for name in type(sums).__slots__ if name != "loss")


def test_the_ratio_of_a_whole_response_by_hand():
    # log ratios 0.1 + 0.2 = 0.3 (the third is masked), -0.5, and a row of which nothing counts.
    # e^0.3 = 1.349859: -2 x 1.2 (clipped); e^-0.5 = 0.606531: 3 x 0.8 (clipped)
    new = torch.tensor([[0.1, 0.2, 9.0], [-0.5, NAN, INF], [1.0, 1.0, 1.0]]).requires_grad_()
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    sums = response_clipped_surrogate(new, torch.zeros(3, 3), torch.tensor([2.0, -3.0, 5.0]), mask, 0.2)
    assert sums.loss.item() == pytest.approx(-2.4 + 2.4, abs=1e-6)
    assert (sums.clipped.item(), sums.count.item()) == (2, 2)
    assert sums.ratio.item() == pytest.approx(1.349859 + 0.606531, abs=1e-5)
    assert sums.approxkl.item() == pytest.approx((0.09 + 0.25) / 2, abs=1e-6)
    assert sums.ratio_max.item() == pytest.approx(1.349859, abs=1e-5)
    wide = response_clipped_surrogate(new, torch.zeros(3, 3), torch.tensor([2.0, -3.0, 5.0]), mask, 0.5)
    wide.loss.backward()  # every token of a response gets -A rho
    expected = [[-2 * 1.349859, -2 * 1.349859, 0], [3 * 0.606531, 0, 0], [0, 0, 0]]
    torch.testing.assert_close(new.grad, torch.tensor(expected), rtol=0, atol=1e-5)


def test_a_correction_multiplies_losses_and_gradients_and_nothing_else():
    # The four sides of above, -1.2 -0.5 1.5 0.8, times 0, 2, 0.5, 3; gradients 0 -0.5 1.5 0 times those.
    new = row(1.5, 0.5, 1.5, 0.5).log().requires_grad_()
    old, advantages, correction = torch.zeros(1, 4), row(1, 1, -1, -1), row(0, 2, 0.5, 3)
    sums = clipped_surrogate(new, old, advantages, everywhere(old), 0.2, correction)
    assert sums.loss.item() == pytest.approx(-1.0 + 0.75 + 2.4, abs=1e-6)
    sums.loss.backward()
    torch.testing.assert_close(new.grad, row(0.0, -1.0, 0.75, 0.0), rtol=0, atol=1e-6)
    plain = clipped_surrogate(new, old, advantages, everywhere(old), 0.2)
    assert all(getattr(sums, name) == getattr(plain, name) for name in type(sums).__slots__ if name != "loss")
    # Of whole responses, ratios 2 and 1/2: -2 x 1.2 x 0.5 and 3 x 0.8 x 0
    new, mask = torch.tensor([[2.0, 1.0], [0.5, 1.0]]).log(), torch.ones(2, 2, dtype=torch.bool)
    whole = response_clipped_surrogate(
        new, 0 * new, torch.tensor([2.0, -3.0]), mask, 0.2, correction=torch.tensor([0.5, 0.0])
    )
    assert whole.loss.item() == pytest.approx(-1.2, abs=1e-6) and whole.count.item() == 2


@pytest.mark.parametrize(
    "estimator, loss, gradient",
    [
        # delta 0.5 and -1. k1: its sum, and 1 each. k2: (0.25 + 1) / 2, and delta.
        # k3: e^-0.5 - 0.5 + e - 2, and 1 - e^-delta.
        ("k1", -0.5, [1.0, 1.0]),
        ("k2", 0.625, [0.5, -1.0]),
        ("k3", 0.8248124, [0.3934693, -1.7182818]),
    ],
)
def test_the_penalty_in_the_loss_by_hand(estimator, loss, gradient):
    logprobs, mask = row(-1.0, -2.0, NAN).requires_grad_(), torch.tensor([[True, True, False]])
    total = kl_loss(logprobs, row(-1.5, -1.0, 0.0), mask, estimator)
    total.backward()
    assert total.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad[0].tolist() == pytest.approx([*gradient, 0.0], abs=1e-6)


def test_weights_of_micro_batches():
    # Rank 0 has micro-batches of 3, 1 and 0 tokens, rank 1 one of 4: 8 tokens, 4 micro-batches, 2 ranks.
    assert loss_weights([3, 1, 0], 8, 4, 2, "optimizer_step") == [1 / 8] * 3
    assert loss_weights([3, 1, 0], 8, 4, 2, "micro_batch") == [1 / 12, 1 / 4, 1 / 4]
    assert loss_weights([3, 1, 0], 8, 4, 2, "micro_batch_sum") == [1 / 6, 1 / 2, 1 / 2]
    assert loss_weights([], 0, 0, 1, "micro_batch") == []
    with pytest.raises(ValueError, match="'token': known are optimizer_step, micro_batch, micro_batch_sum"):
        loss_weights([1], 1, 1, 1, "token")


def test_pairwise_loss_by_hand():
    chosen, rejected = torch.tensor([1.0, 3.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])
    # differences 0, 2, -1: ln 2, ln(1 + e^-2) = 0.126928, ln(1 + e) = 1.313262
    assert pairwise_loss(chosen, rejected).item() == pytest.approx(0.693147 + 0.126928 + 1.313262, abs=1e-5)
    assert pairwise_loss(chosen + 7, rejected + 7).item() == pytest.approx(2.133337, abs=1e-5)


def test_pairwise_loss_is_finite_where_the_sigmoid_is_not():
    chosen = torch.tensor([-200.0]).requires_grad_()
    loss = pairwise_loss(chosen, torch.tensor([0.0]))
    loss.backward()
    assert loss.item() == pytest.approx(200.0) and chosen.grad.item() == pytest.approx(-1.0)


def test_pairwise_loss_from_the_first_difference_by_hand():
    # Row 0: tokens 1 and 2 differ, differences 0 and 2: mean (0.693147 + 0.126928) / 2 = 0.410038.
    # Row 1: from token 1 to the longer end, differences 0, -2, 0: mean (2 x 0.693147 + 2.126928) / 3 = 1.171074.
    # The mean over all five tokens at once would weigh row 1 more.
    chosen = torch.tensor([[9.0, 1.0, 3.0, NAN], [9.0, 4.0, 0.0, 5.0]])
    rejected = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 4.0, 2.0, 5.0]])
    mask = torch.tensor([[False, True, True, False], [False, True, True, True]])
    assert pairwise_loss_from_difference(chosen, rejected, mask).item() == pytest.approx(0.410038 + 1.171074, abs=1e-5)


def test_a_pair_without_difference_adds_nothing():
    scores = torch.tensor([[1.0, 2.0]])
    assert pairwise_loss_from_difference(scores, scores, torch.zeros(1, 2, dtype=torch.bool)).item() == 0.0


RATIOS = row(1.5, 0.5, 1.5, 0.5, 3.0)
ADVANTAGES = row(1, 1, -1, -1, -1)


def surrogate(**options):
    """The loss of each ratio by itself, and its gradient with respect to the log-prob."""
    new = RATIOS.log().requires_grad_()
    terms = [
        clipped_surrogate(new[:, [i]], torch.zeros(1, 1), ADVANTAGES[:, [i]], everywhere(row(0)), 0.2, **options)
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
    whole = response_clipped_surrogate(new, 0 * new, torch.tensor([1.0, -1.0]), everywhere(new), 0.2, dual_clip=2.0)
    assert whole.loss.item() == pytest.approx(-1.2 + 2.0, abs=1e-6)


# Three tokens of ratio 2, 0.5 and 4, and one that does not count, whatever stands there.
NEW, OLD = row(-1.0, -2.0, -0.5, NAN), row(-1 - math.log(2), -2 + math.log(2), -0.5 - math.log(4), INF)
A, COUNTED = row(3.0, -1.0, -2.0, NAN), torch.tensor([[True, True, True, False]])


@pytest.mark.parametrize(
    "options, ratios, clipped",
    [
        ({"clip_range": 1.0, "clip_range_high": 2.0}, [2.0, 0.5, 3.0], 1),  # no lower bound, none for A's sign
        ({"clip_range": 0.2}, [1.2, 0.8, 1.2], 3),
    ],
)
def test_cispo_weighs_the_log_prob_with_the_clipped_ratio_by_hand(options, ratios, clipped):
    # The loss is -ratio x A x log-prob, with half of it for the last token; so its gradient is -ratio x A.
    new = NEW.clone().requires_grad_()
    sums = clipped_weight_loss(new, OLD, A, COUNTED, correction=row(1.0, 1.0, 0.5, 1.0), **options)
    sums.loss.backward()
    gradient = [-3 * ratios[0], ratios[1], 2 * 0.5 * ratios[2]]
    assert sums.loss.item() == pytest.approx(-gradient[0] - 2 * gradient[1] - 0.5 * gradient[2], abs=1e-5)
    assert new.grad[0].tolist() == pytest.approx([*gradient, 0.0], abs=1e-5)
    assert (sums.clipped, sums.count) == (clipped, 3)
    assert sums.ratio.item() == pytest.approx(6.5, abs=1e-5) and sums.ratio_max.item() == pytest.approx(4.0)


def test_sapos_gate_by_hand():
    # tau is 1 for the first, 2 for the others: gates 4 s(1), 2 s(-1), 2 s(6); slopes 4 s (1 - s) times 2, 0.5, 4
    new, s = NEW.clone().requires_grad_(), lambda x: 1 / (1 + math.exp(-x))
    sums = soft_surrogate(new, OLD, A, COUNTED, (1.0, 2.0), weights=row(0.5))
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(0.5 * (-3 * 4 * s(1) + 2 * s(-1) + 2 * 2 * s(6)), abs=1e-5)
    slopes = [4 * s(x) * s(-x) * ratio for x, ratio in ((1, 2.0), (-1, 0.5), (6, 4.0))]
    expected = [0.5 * -3 * slopes[0], 0.5 * slopes[1], 0.5 * 2 * slopes[2], 0.0]
    assert new.grad[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert (sums.clipped, sums.count) == (0, 3)


@pytest.mark.parametrize("loss", [lambda *g: clipped_weight_loss(*g, 0.2), lambda *g: soft_surrogate(*g, (1.0, 1.05))])
def test_at_a_ratio_of_1_their_gradient_is_ppos(loss):
    new = OLD[:, :3].clone().requires_grad_()
    loss(new, OLD[:, :3], A[:, :3], COUNTED[:, :3]).loss.backward()
    assert new.grad[0].tolist() == pytest.approx([-3.0, 1.0, 2.0], abs=1e-6)


def test_the_geometric_mean_of_a_responses_ratios_by_hand():
    # Log ratios 0.1 and 0.3: their mean is 0.2; -0.5 alone; nothing; what is masked may be anything.
    new = torch.tensor([[0.1, 0.3, 9.0], [-0.5, NAN, INF], [1.0, 1.0, 1.0]]).requires_grad_()
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    old, advantages = torch.zeros(3, 3), torch.tensor([2.0, 3.0, 5.0])
    assert response_log_ratios(new, old, mask, mean=True).tolist() == pytest.approx([0.2, -0.5, 0.0])
    assert response_log_ratios(new, old, mask).tolist() == pytest.approx([0.4, -0.5, 0.0])
    assert masked_log_ratios(new, old, mask).tolist()[1] == pytest.approx([-0.5, 0.0, 0.0])
    sums = response_clipped_surrogate(new, old, advantages, mask, 0.6, mean=True)
    assert sums.loss.item() == pytest.approx(-2 * math.exp(0.2) - 3 * math.exp(-0.5), abs=1e-5) and sums.count == 2
    sums.loss.backward()  # each of n tokens gets -A rho / n
    expected = [[-math.exp(0.2)] * 2 + [0.0], [-3 * math.exp(-0.5), 0.0, 0.0], [0.0] * 3]
    torch.testing.assert_close(new.grad, torch.tensor(expected), rtol=0, atol=1e-5)
    near = response_clipped_surrogate(new, old, advantages, mask, 0.1, clip_range_high=0.15, mean=True)
    assert near.loss.item() == pytest.approx(-2 * 1.15 - 3 * math.exp(-0.5), abs=1e-5) and near.clipped == 1


def test_shares_make_a_sum_of_the_responses_means():
    # Ratios 1: losses are -A. Means of -1 -2 -3, of -4, of none.
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    advantages, zeros = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, 9.0], [7.0, 7.0, 7.0]]), torch.zeros(3, 3)
    assert shares_of_responses(mask).tolist() == [[pytest.approx(1 / 3)], [1.0], [1.0]]
    sums = clipped_surrogate(zeros, zeros, advantages, mask, 0.2, weights=shares_of_responses(mask))
    assert sums.loss.item() == pytest.approx(-2.0 - 4.0) and (sums.count, sums.ratio) == (4, 4)
    correction = torch.tensor([[0.5, 1.0, 2.0], [3.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    both = clipped_surrogate(zeros, zeros, advantages, mask, 0.2, correction, weights=shares_of_responses(mask))
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


@pytest.mark.parametrize("guard", [ratio_exploded, went_too_far])
@pytest.mark.parametrize(
    "total, count, limit, expected",
    [
        (8.0, 4, 1.9, True),
        (8.0, 4, 2.0, False),
        (8.0, 4, 2.1, False),
        (8.0, 4, None, False),
        (float("nan"), 4, 2.0, True),
        (float("inf"), 4, 2.0, True),
        (float("nan"), 4, None, False),
        (0.0, 0, 2.0, False),
    ],
)
def test_the_mean_is_held_against_the_limit(guard, total, count, limit, expected):
    assert guard(total, count, limit) is expected
