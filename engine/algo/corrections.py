"""Importance sampling from a sampler that is not quite the policy that learns: in 16 bits, or in another engine.

Tokens are drawn by the sampler's probabilities mu, and learned as if by those of the policy's forward pass, pi_old. The
ratio pi_old / mu makes up for it: a number without a gradient, by which the policy's loss is multiplied, after what is
far from 1 was cut to a bound (truncated importance sampling, TIS) or to 0 (masked, MIS; by token also called IcePop).

Sources, with whose names ours agree:
    TRL's GRPO trainer, as kept in casinca/trl 2674c4f8, trl/trainer/grpo_trainer.py: `vllm_importance_sampling_mode`
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", `..._min` and `..._max`.
    verl-project/verl be3e5054, verl/trainer/ppo/rollout_corr_helper.py, `compute_rollout_correction_weights`:
        `rollout_is` "token" or "sequence", with one threshold for TIS and two for IcePop.
    OpenRLHF, as kept in TsinghuaC3I/MARTI 84a2f081, openrlhf/models/loss.py, `PolicyLoss`: `vllm_is_level`,
        `vllm_is_mode` "truncate" or "mask".
As in TRL, a token that is masked still counts where the loss is divided by the number of tokens, so that the others'
share does not depend on it, and a KL penalty in the loss is not multiplied. verl can also take tokens out of that count
(`rollout_rs`) or divide ratios by their mean. That copy of OpenRLHF also has a response's mean ratio (by which upstream
chooses responses, "seq-mask-tis"), and leaves out responses with a token that is nearly impossible. None of it is here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FARTHEST = 20.0  # nats; e^20 is finite in float32 with room for sums, and means the same as all that is larger


def bounded(log_ratios: Tensor) -> Tensor:
    """Log-ratios (any shape) between -FARTHEST and FARTHEST, so that exp neither overflows nor becomes 0.

    Source of the bound: verl, as above, SAFETY_BOUND.
    """
    return log_ratios.clamp(-FARTHEST, FARTHEST)


def importance_ratios(log_ratios: Tensor) -> Tensor:
    """The policy's probability over the sampler's, from differences of log-probs (any shape, float32)."""
    return bounded(log_ratios).exp()


def token_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """pi_old / mu of each token: (B, T) float32, 1 outside the mask.

    Of low variance, and biased: the tokens before this one were drawn by mu too.

    Args:
        log_ratios: (B, T) float32, log pi_old - log mu. mask: (B, T) bool, tokens that were drawn.
    """
    return importance_ratios(torch.where(mask, log_ratios, torch.zeros_like(log_ratios)))


def sequence_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """pi_old / mu of each whole response, the product over its tokens, on all positions of its row: (B, T) float32.

    Without a bias, and of a variance that grows with the length. Arguments as of `token_ratios`.
    """
    log_ratios = torch.where(mask, log_ratios, torch.zeros_like(log_ratios))
    return importance_ratios(log_ratios.sum(-1, keepdim=True)).expand_as(log_ratios)


def truncated(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Ratios (any shape) cut to these bounds.

    Source: Ionides 2008, "Truncated importance sampling", which has the upper one; so have TRL and verl.
    """
    return ratios.clamp(lowest, highest)


def masked(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Ratios (any shape) where they are within these bounds, which belong to them, and 0 elsewhere.

    Source: Ling Team 2025, "Every step evolves" (IcePop, of tokens); TRL, verl and OpenRLHF, as above.
    """
    return torch.where(outside(ratios, lowest, highest), torch.zeros_like(ratios), ratios)


def outside(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Which ratios (any shape) a correction cuts, bool."""
    return (ratios < lowest) | (ratios > highest)


@dataclass(frozen=True, slots=True)
class Correction:
    """What the policy's loss is multiplied by.

    ratios: (log_ratios, mask) -> (B, T), as `token_ratios`. cut: (ratios, lowest, highest) -> (B, T), as `truncated`.
    of_responses: whether all positions of a row have one number.
    """

    ratios: Callable[[Tensor, Tensor], Tensor]
    cut: Callable[[Tensor, float, float], Tensor]
    of_responses: bool = False


CORRECTIONS = {
    "token_truncate": Correction(token_ratios, truncated),
    "token_mask": Correction(token_ratios, masked),
    "sequence_truncate": Correction(sequence_ratios, truncated, of_responses=True),
    "sequence_mask": Correction(sequence_ratios, masked, of_responses=True),
}
