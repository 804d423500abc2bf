"""Actor and reference that differ before the first update stop the run, and rounding does not."""

from types import SimpleNamespace

import pytest
import torch

from engine.errors import RunStopped
from training.reporting.first_kl import rounding_bound, stop_unless_at_reference


def experience(*gaps):
    """One response a row with these differences; a slot of padding behind each."""
    kl = torch.tensor([[*row, 0.0] for row in gaps])
    mask = torch.tensor([[True] * len(row) + [False] for row in gaps])
    return SimpleNamespace(kl=kl, rollout=SimpleNamespace(response_mask=mask))


def test_it_is_the_mean_absolute_difference_of_a_token():
    rows = experience([0.5, -0.5], [0.25, -0.15])  # whose sum is 0.1 and whose absolute values are 1.4 in 4 tokens
    stop_unless_at_reference(1, rows, 0.351)
    with pytest.raises(RunStopped, match=r"^step 1: .* differ by 0\.35 nats a token on average; .* explains 0\.349\."):
        stop_unless_at_reference(1, rows, 0.349)
    stop_unless_at_reference(2, rows, 0.349)  # an update may move it
    stop_unless_at_reference(1, rows, None)


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
