"""Actor and reference that differ before the first update stop the run, and rounding does not."""

from types import SimpleNamespace

import pytest
import torch

from engine.errors import RunStopped
from training.reporting.guards import rounding_bound, stop_unless_at_reference, stop_unless_weights_finite


def experience(*gaps, sampled=False):
    """One response a row with these differences; a slot of padding behind each."""
    kl = torch.tensor([[*row, 0.0] for row in gaps])
    mask = torch.tensor([[True] * len(row) + [False] for row in gaps])
    by_sampler = torch.zeros_like(kl)
    logprobs = by_sampler if sampled else by_sampler.clone()
    return SimpleNamespace(kl=kl, logprobs=logprobs, rollout=SimpleNamespace(actions=mask, logprobs=by_sampler))


def test_it_is_the_mean_absolute_difference_of_a_token():
    rows = experience([0.5, -0.5], [0.25, -0.15])  # whose sum is 0.1 and whose absolute values are 1.4 in 4 tokens
    stop_unless_at_reference(1, rows, 0.351)
    with pytest.raises(RunStopped, match=r"^step 1: .* differ by 0\.35 nats a token on average; .* explains 0\.349\."):
        stop_unless_at_reference(1, rows, 0.349)
    with pytest.raises(RunStopped, match=r"^step 51: the reference has just become the actor, so"):
        stop_unless_at_reference(51, rows, 0.349)
    stop_unless_at_reference(1, rows, None)


@pytest.mark.parametrize("sampled, advice", [(True, "Take --old_logprobs forward"), (False, "--rollout_backend zero3")])
def test_the_sampler_is_named_where_its_log_probs_were_taken(sampled, advice):
    with pytest.raises(RunStopped, match=f"differ by 0.5 nats .* {advice}"):
        stop_unless_at_reference(1, experience([0.5, -0.5], sampled=sampled), 0.001)


def test_bounds_follow_the_mantissa_and_the_temperature():
    assert rounding_bound("bf16") == 0.25 and rounding_bound("fp16") == 0.03125
    assert rounding_bound("fp32") == 1e-3
    assert rounding_bound("bf16", 0.5) == 0.5 and rounding_bound("bf16", 2.0) == 0.25
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert rounding_bound("fp32") == 0.03125
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_gradient_that_is_not_finite_may_come_from_a_kernel():
    model = SimpleNamespace(weights_finite=lambda: True, grad_norm=1.0)
    stop_unless_weights_finite(3, {"actor": model})
    model.grad_norm = float("nan")
    advice = "Lower the learning rates.* a kernel of attention .* try --attn_implementation eager"
    with pytest.raises(RunStopped, match=f"^step 3: .* norm of the actor's gradient.* {advice}"):
        stop_unless_weights_finite(3, {"actor": model})
