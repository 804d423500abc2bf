"""Estimates the KL divergence from samples, and controls the KL coefficient."""

from collections.abc import Callable

import torch
from torch import Tensor

KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: torch.expm1(-x) + x,
}
"""{name: function of x = log p - log q at each token}. A new estimator is one line; with kl_in=loss, its gradient is
learned from. k1 and k3 are unbiased, k2 and k3 never negative. Source: Schulman 2020, "Approximating KL divergence"."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Estimates KL(policy || reference) at each token, from tokens drawn from the policy. The result has the shape of
    the arguments. Raises: KeyError for an unknown estimator."""
    return KL_ESTIMATORS[estimator](logprobs - ref_logprobs)


def measured_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, measure: str = "k1") -> Tensor:
    """The KL that the controller of the KL coefficient gets: (B,), in nats, for each sequence a sum over its tokens.

    "k1" sums delta = log p - log q. "exp_delta" sums exp(delta) - 1 - delta, which is k3 with the sign of delta
    reversed. "exp_delta" is never negative, but its mean over tokens drawn from the policy is not the KL.

    Args:
        logprobs, ref_logprobs: (B, N) float32.
        mask: (B, N) bool, the tokens that are summed over. trlX sums "exp_delta" over all tokens of prompt and response
            but the first, since training also changes the policy's log-probs of the prompt.

    Source: "k1" openai/lm-human-preferences cbfd210b, train_policy.py, `record_step_stats`; "exp_delta" CarperAI/trlx
    3340c2f3, trlx/trainer/accelerate_ppo_trainer.py, `make_experience`.
    """
    delta = torch.where(mask, logprobs - ref_logprobs, torch.zeros_like(logprobs))
    if measure == "k1":
        return delta.sum(-1)
    if measure == "exp_delta":
        return (torch.expm1(delta) - delta).sum(-1)
    raise ValueError(f"KL measure {measure!r}: known are k1, exp_delta")


class FixedKL:
    """A constant KL coefficient."""

    def __init__(self, value: float):
        self.value = value

    def after_step(self, kl: float, responses: int) -> None:
        """Does nothing."""

    def after_epoch(self, kl: float, responses: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Does nothing: a resumed run uses the coefficient that its flags give."""


class AdaptiveKL:
    """A KL coefficient that is adapted so that the KL approaches a target (Ziegler et al. 2019, section 2.2).

    error = clip(KL / target - 1, -0.2, 0.2),   value *= 1 + error * count / horizon

    per: "step": the coefficient changes once after each PPO step, with count = the number of all responses of the step.
    "epoch": it changes after each PPO epoch, with count = the number of responses of a mini-batch, as in CarperAI/trlx
    3340c2f3 (trlx/trainer/accelerate_ppo_trainer.py).
    """

    def __init__(self, value: float, target: float, horizon: float, per: str = "step"):
        if per not in ("step", "epoch"):
            raise ValueError(f"a coefficient that changes per {per!r}: known are step, epoch")
        self.value = value
        self.target = target
        self.horizon = horizon
        self.per = per

    def after_step(self, kl: float, responses: int) -> None:
        """To be called after each PPO step. kl: the mean over the responses of all ranks, in nats. responses: the
        number of responses that all ranks generated."""
        if self.per == "step":
            self.update(kl, responses)

    def after_epoch(self, kl: float, responses: int) -> None:
        """To be called after each PPO epoch. kl: as in `after_step`. responses: the number of responses in one
        mini-batch of this rank."""
        if self.per == "epoch":
            self.update(kl, responses)

    def update(self, kl: float, count: int) -> None:
        """Change the coefficient according to the mean KL of `count` responses, in nats per response.

        The coefficient stays equal on all ranks only if `kl` is equal on all ranks, so callers reduce `kl` over ranks
        first.
        """
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * count / self.horizon

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]
