"""Advantages from rewards and values: the formulas, and the table of estimators that a run may choose from.

A new estimator is one function and one line of ESTIMATORS; what it needs stands beside it, and is checked when flags
are read. docs/extending.md does it from outside.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the response slots.

        d_t = r_t + gamma V_{t+1} - V_t,   A_t = d_t + gamma lam A_{t+1},   R_t = A_t + V_t

    The value past the last slot is 0: a response that ends is a terminal state. Callers put zeros into `rewards` and
    `values` after a row's end, so that nothing flows back from there.

    Args:
        rewards, values: (B, T) float32; slot t holds the reward of response token t and the value before it.

    Returns: (advantages, returns), each (B, T) float32.

    Source: Schulman et al. 2016, "High-dimensional continuous control using GAE", eq. 16.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = error + gamma * lam * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def rloo(rewards: Tensor, group_size: int, valid: Tensor | None = None) -> Tensor:
    """REINFORCE leave-one-out: each response's reward less the mean reward of the other responses to its prompt.

        A_i = s_i - 1 / (k - 1) * (sum of s_j over the group's j other than i)

    Args:
        rewards: (B,) float32, each response's score less its KL penalty. The k rows of a group stand side by side.
        group_size: k, at least 2.
        valid: (B,) bool, the responses that count, by default all; the mean is over the valid others.

    Returns: (B,) float32; 0 for a response that is not valid, and for one without a valid other.
    Raises: ValueError if k is 1 or B is no multiple of it.

    Source: Ahmadian et al. 2024, "Back to basics: revisiting REINFORCE style optimization for learning from human
    feedback in LLMs", section 2.3; huggingface/trl v0.11.0, trl/trainer/rloo_trainer.py (which keeps sample j of prompt
    i at row j B + i).
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(
            f"RLOO of {len(rewards)} responses in groups of {group_size}: groups are of 2 or more, and "
            "the responses a multiple of that"
        )
    counted = (torch.ones_like(rewards) if valid is None else valid.to(rewards.dtype)).view(-1, group_size)
    own = torch.where(counted.bool(), rewards.view(-1, group_size), torch.zeros_like(counted))
    others = counted.sum(-1, keepdim=True) - counted
    baseline = (own.sum(-1, keepdim=True) - own) / others.clamp(min=1)
    return torch.where((counted > 0) & (others > 0), own - baseline, torch.zeros_like(own)).view(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may look at: B responses of one rank, T slots; groups stand side by side.

    rewards, values: (B, T) float32, zeros after a response's end (values: zeros everywhere without a critic).
    policy_mask: (B, T) bool, the slots that the policy's loss is summed over.
    valid: (B,) bool, the responses that count.
    group_size: responses to each prompt. gamma, lam: discount and lambda.
    """

    rewards: Tensor
    values: Tensor
    policy_mask: Tensor
    valid: Tensor
    group_size: int
    gamma: float
    lam: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """An estimator, what it needs, and what it gives.

    compute: returns (advantages, returns), each (B, T) float32, or (B,) where there is one for each response.
    needs_critic: whether it reads values; without, no critic is built. needs_groups: whether it compares the responses
    to one prompt, of which there must then be 2 or more. per_response: whether it gives one number a response.
    """

    compute: Callable[[AdvantageInputs], tuple[Tensor, Tensor]]
    needs_critic: bool = False
    needs_groups: bool = False
    per_response: bool = False


def _gae(given: AdvantageInputs) -> tuple[Tensor, Tensor]:
    return gae(given.rewards, given.values, given.gamma, given.lam)


def _rloo(given: AdvantageInputs) -> tuple[Tensor, Tensor]:
    totals = given.rewards.sum(-1)
    return rloo(totals, given.group_size, given.valid), totals


ESTIMATORS = {
    "gae": AdvantageEstimator(compute=_gae, needs_critic=True),
    "rloo": AdvantageEstimator(compute=_rloo, needs_groups=True, per_response=True),
}
