"""Estimators of the KL divergence from samples, and controllers of its coefficient."""
import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens drawn from the policy, same shape as the arguments.

        k1 = log p - log q,   k2 = k1^2 / 2,   k3 = exp(-k1) - 1 + k1

    k1 and k3 are unbiased, k2 and k3 never negative. Source: Schulman 2020, "Approximating KL divergence".
    """
    k1 = logprobs - ref_logprobs
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return k1 * k1 / 2
    if estimator == "k3":
        return torch.expm1(-k1) + k1
    raise ValueError(f"KL estimator {estimator!r}: known are k1, k2, k3")


class FixedKL:
    """A coefficient that stays what it is."""

    def __init__(self, value: float):
        self.value = value

    def update(self, kl: float, count: int) -> None:
        """Nothing changes, whatever was measured."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Nothing changes during a run: the value stays the one given."""


class AdaptiveKL:
    """A coefficient steered towards a target KL (Ziegler et al. 2019, section 2.2).

        error = clip(KL / target - 1, -0.2, 0.2),   value *= 1 + error * count / horizon
    """

    def __init__(self, value: float, target: float, horizon: float):
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl: float, count: int) -> None:
        """Take note of the mean KL (nats a response, over all ranks) of `count` responses."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * count / self.horizon

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]
