"""Importance sampling corrects for a sampler that differs slightly from the trained policy. The two differ if the
sampler computes in 16 bits or in another engine.

Tokens are drawn with the sampler's probabilities mu, but the loss treats them as drawn with the probabilities pi_old of
the policy's forward pass. To correct for this, the policy's loss is multiplied by the ratio pi_old / mu, which has no
gradient. A ratio far from 1 is first cut to a bound (truncated importance sampling, TIS) or set to 0 (masked importance
sampling, MIS; with one ratio per token also called IcePop). Instead of the ratio, a divergence of the two probabilities
can say which ratios are set to 0: a token that both find improbable may have a ratio far from 1, but moves little.

Sources; our names agree with theirs:
    TRL 1.16.0, trl/trainer/grpo_trainer.py: `vllm_importance_sampling_mode` "token_truncate", "token_mask",
        "sequence_truncate", "sequence_mask", `vllm_importance_sampling_clip_min` and `..._clip_max`.
    verl 0.9.1, verl/trainer/ppo/rollout_corr_helper.py, `compute_rollout_correction_weights`: `rollout_is` "token" or
        "sequence", with one threshold for TIS and two for IcePop.
    OpenRLHF 0.11.2, openrlhf/models/loss.py, `PolicyLoss`: `is_correction_level` "token" or "seq",
        `is_correction_mode` "clip" or "mask", `is_correction_gating` "ratio", "binary_kl" or "tv".
As in TRL, a masked token still counts in the number of tokens that the loss is divided by, so that masking it does not
change the weight of other tokens. A KL penalty in the loss is not multiplied by the ratio. Not implemented: verl can
also take masked tokens out of the number of tokens (`rollout_rs`), or divide ratios by their mean. OpenRLHF's level
"seq" with the gating "ratio" keeps each token's ratio in responses whose geometric mean is within bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algo.masked import masked_sum

FARTHEST = 20.0  # nats; sums of e^20 stay finite in float32, and a larger ratio would tell no more


def bounded(log_ratios: Tensor) -> Tensor:
    """Log-ratios (any shape) clamped to -FARTHEST and FARTHEST, so that their exp neither overflows nor becomes 0.

    Source of the bound: SAFETY_BOUND in verl's file named above.
    """
    return log_ratios.clamp(-FARTHEST, FARTHEST)


def importance_ratios(log_ratios: Tensor) -> Tensor:
    """The policy's probabilities divided by the sampler's. log_ratios: differences of log-probs (any shape,
    float32)."""
    return bounded(log_ratios).exp()


def token_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """pi_old / mu of each token: (B, T) float32, 1 outside the mask.

    This ratio has a low variance. It is biased, because it does not correct for the preceding tokens, which were drawn
    with mu too.

    Args:
        log_ratios: (B, T) float32, log pi_old - log mu. mask: (B, T) bool, tokens that were drawn.
    """
    return importance_ratios(torch.where(mask, log_ratios, torch.zeros_like(log_ratios)))


def sequence_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """pi_old / mu of each whole response, the product of its tokens' ratios: (B, T) float32, with the same number at
    all positions of a row.

    This ratio is unbiased. Its variance grows with the response's length. Arguments: as for `token_ratios`.
    """
    log_ratios = torch.where(mask, log_ratios, torch.zeros_like(log_ratios))
    return importance_ratios(log_ratios.sum(-1, keepdim=True)).expand_as(log_ratios)


def truncated(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Ratios (any shape) clamped to the bounds `lowest` and `highest`.

    Source: Ionides 2008, "Truncated importance sampling". The paper, TRL and verl have only the upper bound.
    """
    return ratios.clamp(lowest, highest)


def masked(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Ratios (any shape), with those outside the bounds `lowest` and `highest` replaced by 0. A ratio equal to a bound
    is kept.

    Source: Ling Team 2025, "Every step evolves" (IcePop, of tokens); TRL, verl and OpenRLHF, as above.
    """
    return torch.where(outside(ratios, lowest, highest), torch.zeros_like(ratios), ratios)


def outside(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Whether each ratio is outside the bounds, so that a correction cuts it: bool, in the shape of `ratios`."""
    return (ratios < lowest) | (ratios > highest)


SURE = 1 - 1e-6  # probabilities are kept below this number, and over 1 - SURE, so that the logs of binary_kl are finite


def binary_kl(logprobs: Tensor, sampled: Tensor) -> Tensor:
    """KL(mu || pi) of the question whether this token is drawn, in nats, in the shape of the arguments: log-probs of
    drawn tokens under the policy and under the sampler. It is at most the KL of the whole distributions."""
    pi, mu = (one.exp().clamp(1 - SURE, SURE) for one in (logprobs, sampled))
    return mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()


def total_variation(logprobs: Tensor, sampled: Tensor) -> Tensor:
    """|pi - mu| of the drawn token. It is at most the total variation of the whole distributions. Arguments: as for
    `binary_kl`."""
    return (logprobs.exp() - sampled.exp()).abs()


@dataclass(frozen=True, slots=True)
class Correction:
    """Says how to compute the factor of the policy's loss.

    ratios: (log_ratios, mask) -> (B, T), as `token_ratios`.
    cut: (ratios, lowest, highest) -> (B, T), as `truncated`.
    of_responses: whether all positions of a row have the same ratio.
    divergence: (logprobs, sampled) -> (B, T), as `binary_kl`. With it, ratios are set to 0 where the divergence, and
        not the ratio, is over the upper bound.
    over_responses: whether it is the divergence's mean over the response that counts.
    """

    ratios: Callable[[Tensor, Tensor], Tensor]
    cut: Callable[[Tensor, float, float], Tensor]
    of_responses: bool = False
    divergence: Callable[[Tensor, Tensor], Tensor] | None = None
    over_responses: bool = False

    def weights(
        self, logprobs: Tensor, sampled: Tensor, mask: Tensor, lowest: float, highest: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the factors of the policy's loss, (B, T) float32, and which of them were cut, (B, T) bool.

        Args:
            logprobs, sampled: (B, T) float32, log pi_old and log mu. mask: (B, T) bool, tokens that were drawn.
        """
        ratios = self.ratios(logprobs - sampled, mask)
        if self.divergence is None:
            return self.cut(ratios, lowest, highest), outside(ratios, lowest, highest)
        apart = self.divergence(*(torch.where(mask, one, torch.zeros_like(one)) for one in (logprobs, sampled)))
        if self.over_responses:
            apart = (masked_sum(apart, mask, -1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1).expand_as(apart)
        far = apart > highest
        return torch.where(far, torch.zeros_like(ratios), ratios), far


CORRECTIONS = {
    "token_truncate": Correction(token_ratios, truncated),
    "token_mask": Correction(token_ratios, masked),
    "sequence_truncate": Correction(sequence_ratios, truncated, of_responses=True),
    "sequence_mask": Correction(sequence_ratios, masked, of_responses=True),
    "token_binary_kl": Correction(token_ratios, masked, divergence=binary_kl),
    "token_tv": Correction(token_ratios, masked, divergence=total_variation),
    "sequence_binary_kl": Correction(token_ratios, masked, divergence=binary_kl, over_responses=True),
    "sequence_tv": Correction(token_ratios, masked, divergence=total_variation, over_responses=True),
}
