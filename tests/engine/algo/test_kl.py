"""KL estimators by hand and by exact expectation; the adaptive controller against published numbers."""

import math

import pytest
import torch

from engine.algo.kl import AdaptiveKL, FixedKL, kl_estimate, measured_kl


def test_estimators_by_hand():
    logprobs, reference = torch.tensor([-1.0, -1.5, -2.0]), torch.tensor([-1.5, -1.0, -2.0])
    assert kl_estimate(logprobs, reference).tolist() == [0.5, -0.5, 0.0]
    assert kl_estimate(logprobs, reference, "k1").tolist() == [0.5, -0.5, 0.0]
    assert kl_estimate(logprobs, reference, "k2").tolist() == [0.125, 0.125, 0.0]
    # e^-0.5 - 1 + 0.5 and e^0.5 - 1 - 0.5
    expected = [0.1065307, 0.1487213, 0.0]
    assert kl_estimate(logprobs, reference, "k3").tolist() == pytest.approx(expected, abs=1e-6)


def test_expectations_under_the_policy():
    policy, reference = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    divergence = sum(p * math.log(p / q) for p, q in zip(policy, reference))
    weights = torch.tensor(policy, dtype=torch.float64)
    logs = weights.log(), torch.tensor(reference, dtype=torch.float64).log()
    for estimator in ("k1", "k3"):
        assert (weights * kl_estimate(*logs, estimator)).sum().item() == pytest.approx(divergence, rel=1e-12)
    half_squares = sum(p * math.log(p / q) ** 2 / 2 for p, q in zip(policy, reference))
    assert (weights * kl_estimate(*logs, "k2")).sum().item() == pytest.approx(half_squares, rel=1e-12)
    # With the sign of the log ratio turned, k3 would be another number.
    turned = sum(p * (p / q - 1 - math.log(p / q)) for p, q in zip(policy, reference))
    assert turned != pytest.approx(divergence, rel=0.1)


def test_k3_of_nearly_equal_policies_is_not_rounded_away():
    # x^2 / 2 - x^3 / 6 at x = 1e-4; exp(-x) - 1 in float32 would lose all of it.
    tiny = torch.tensor([1e-4, -1e-4])
    estimates = kl_estimate(tiny, torch.zeros(2), "k3")
    assert estimates.tolist() == pytest.approx([4.9998e-9, 5.0002e-9], rel=2e-2)
    assert estimates.min() > 0


def test_what_a_controller_measures_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, 7.0], [-1.0, float("nan"), float("inf")]])
    reference = torch.tensor([[-1.5, -1.0, 0.0], [-1.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert measured_kl(logprobs, reference, mask).tolist() == [-0.5, 0.0]
    # e^0.5 - 1 - 0.5 and e^-1 - 1 + 1; k3 of the same would be e^-0.5 - 1 + 0.5 and e - 1 - 1
    expected = [0.1487213 + 0.3678794, 0.0]
    assert measured_kl(logprobs, reference, mask, "exp_delta").tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="'k3': known are k1, exp_delta"):
        measured_kl(logprobs, reference, mask, "k3")


def test_the_adaptive_controller_gives_the_published_number():
    # KL 3 of target 6: error -0.5, cut to -0.2; 0.15 x (1 - 0.2 x 512 / 10000)
    controller = AdaptiveKL(0.15, target=6, horizon=10000)
    controller.update(3.0, 512)
    assert controller.value == pytest.approx(0.148464, abs=1e-12)


@pytest.mark.parametrize(
    "kl, error", [(6.0, 0.0), (6.6, 0.1), (7.2, 0.2), (60.0, 0.2), (5.4, -0.1), (4.8, -0.2), (0.0, -0.2), (-6.0, -0.2)]
)
def test_both_sides_of_the_adaptive_controller_are_clipped(kl, error):
    controller = AdaptiveKL(0.1, target=6, horizon=1000)
    controller.update(kl, 100)
    assert controller.value == pytest.approx(0.1 * (1 + error * 0.1), rel=1e-12)


def test_an_adaptive_coefficient_survives_a_restart_and_a_fixed_one_stays_what_was_given():
    first, second = AdaptiveKL(0.1, 6, 1000), AdaptiveKL(0.7, 6, 1000)
    first.update(60.0, 500)
    second.load_state_dict(first.state_dict())
    assert second.value == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    fixed = FixedKL(0.7)
    fixed.load_state_dict(FixedKL(0.1).state_dict())
    assert fixed.value == 0.7
