"""PPO's two losses and the reward model's, as sums and counts.

A sum can be added up over micro-batches and ranks before it is divided; a mean cannot. So each function returns what
it summed and the caller divides once, by the count of the whole optimizer step.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.algo.masked import masked_sum


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Sums over the masked tokens, each a scalar tensor; only `loss` carries a gradient."""
    loss: Tensor
    clipped: Tensor     # tokens whose clipped loss is the larger one
    approxkl: Tensor    # (log ratio)^2 / 2, Schulman's k2 of old against new
    ratio: Tensor
    ratio_max: Tensor   # a maximum, not a sum


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Sums over the masked tokens, each a scalar tensor; only `loss` carries a gradient."""
    loss: Tensor
    clipped: Tensor
    value: Tensor


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor,
                clip_range: float) -> PolicyLoss:
    """The clipped surrogate: sum over tokens of max(-A rho, -A clip(rho, 1 - clip_range, 1 + clip_range)).

    Args:
        logprobs: (B, T) float32 of the policy being trained.
        old_logprobs, advantages: (B, T) float32 of the rollout.
        mask: (B, T) bool.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7.
    """
    # Outside the mask the two may differ by anything; exp of that could overflow and poison the gradient.
    log_ratio = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    still = ratio.detach()
    return PolicyLoss(
        loss=masked_sum(torch.maximum(plain, clipped), mask),
        clipped=masked_sum((clipped > plain).float(), mask),
        approxkl=masked_sum(log_ratio.detach() ** 2 / 2, mask),
        ratio=masked_sum(still, mask),
        ratio_max=torch.where(mask, still, torch.zeros_like(still)).max())


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float) -> ValueLoss:
    """Half the sum over tokens of the larger of (V - R)^2 and (clip(V, V0 - clip_range, V0 + clip_range) - R)^2.

    Args:
        values: (B, T) float32 of the critic being trained.
        old_values, returns: (B, T) float32 of the rollout.
        mask: (B, T) bool.

    Source: openai/lm-human-preferences cbfd210b, train_policy.py, `loss`.
    """
    values = torch.where(mask, values, torch.zeros_like(values))  # as above: nothing from outside reaches the gradient
    near = torch.minimum(torch.maximum(values, old_values - clip_range), old_values + clip_range)
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    return ValueLoss(
        loss=0.5 * masked_sum(torch.maximum(plain, clipped), mask),
        clipped=masked_sum((clipped > plain).float(), mask),
        value=masked_sum(values.detach(), mask))


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Sum over pairs of -log sigmoid(chosen - rejected); (N,) float32 each.

    Source: Stiennon et al. 2020, "Learning to summarize from human feedback", section 3.4.
    """
    return -F.logsigmoid(chosen - rejected).sum()


def pairwise_loss_from_difference(chosen: Tensor, rejected: Tensor, mask: Tensor) -> Tensor:
    """Sum over pairs of the mean over tokens of -log sigmoid(chosen - rejected).

    Args:
        chosen, rejected: (N, S) float32, the scores at every token.
        mask: (N, S) bool, set from the first differing token to the end of the longer sequence.

    Source: DeepSpeed-Chat's `RewardModel.forward` (DeepSpeedExamples 83757d9c).
    """
    losses = -F.logsigmoid(chosen - rejected)
    return (masked_sum(losses, mask, dim=-1) / mask.sum(-1).clamp(min=1)).sum()
