"""Importance sampling, for a sampler that differs slightly from the policy that learns: it computes in 16 bits, or in
another engine.

Tokens are drawn with the sampler's probabilities mu, but learned as if drawn with those of the policy's forward pass,
pi_old. The ratio pi_old / mu corrects for this. It has no gradient, and the policy's loss is multiplied by it. Ratios
far from 1 are first cut to a bound (truncated importance sampling, TIS) or set to 0 (masked, MIS; by token also called
IcePop).

Sources; our names agree with theirs:
    TRL's GRPO trainer, as kept in casinca/trl 2674c4f8, trl/trainer/grpo_trainer.py: `vllm_importance_sampling_mode`
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", `..._min` and `..._max`.
    verl-project/verl be3e5054, verl/trainer/ppo/rollout_corr_helper.py, `compute_rollout_correction_weights`:
        `rollout_is` "token" or "sequence", with one threshold for TIS and two for IcePop.
    OpenRLHF, as kept in TsinghuaC3I/MARTI 84a2f081, openrlhf/models/loss.py, `PolicyLoss`: `vllm_is_level`,
        `vllm_is_mode` "truncate" or "mask".
As in TRL, a masked token still counts where the loss is divided by the number of tokens, so the weight of other tokens
does not depend on it. A KL penalty in the loss is not multiplied by the ratio. Not implemented: verl can also take
tokens out of that count (`rollout_rs`) or divide ratios by their mean; OpenRLHF as kept in MARTI also has a response's
mean ratio (by which upstream chooses responses, "seq-mask-tis"), and leaves out responses with a nearly impossible
token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FARTHEST = 20.0  # nats; e^20 is finite in float32 with room for sums, and a larger ratio would mean nothing else


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

    It has a low variance and a bias: the tokens before this one were drawn with mu too.

    Args:
        log_ratios: (B, T) float32, log pi_old - log mu. mask: (B, T) bool, tokens that were drawn.
    """
    return importance_ratios(torch.where(mask, log_ratios, torch.zeros_like(log_ratios)))


def sequence_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """pi_old / mu of each whole response, the product over its tokens, repeated on all positions of its row: (B, T)
    float32.

    It has no bias, and a variance that grows with the length. Arguments: as for `token_ratios`.
    """
    log_ratios = torch.where(mask, log_ratios, torch.zeros_like(log_ratios))
    return importance_ratios(log_ratios.sum(-1, keepdim=True)).expand_as(log_ratios)


def truncated(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Ratios (any shape) cut to these bounds.

    Source: Ionides 2008, "Truncated importance sampling", which has the upper bound, as TRL and verl have.
    """
    return ratios.clamp(lowest, highest)


def masked(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Ratios (any shape) where they are within these bounds (inclusive), and 0 elsewhere.

    Source: Ling Team 2025, "Every step evolves" (IcePop, of tokens); TRL, verl and OpenRLHF, as above.
    """
    return torch.where(outside(ratios, lowest, highest), torch.zeros_like(ratios), ratios)


def outside(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Which ratios are outside the bounds, so that a correction cuts them: bool, of their shape."""
    return (ratios < lowest) | (ratios > highest)


@dataclass(frozen=True, slots=True)
class Correction:
    """How the factor of the policy's loss is computed.

    ratios: (log_ratios, mask) -> (B, T), as `token_ratios`. cut: (ratios, lowest, highest) -> (B, T), as `truncated`.
    of_responses: whether all positions of a row have the same ratio.
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
