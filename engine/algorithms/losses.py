"""The losses of a dialect, summed over a micro-batch. The formulas are in engine/algo/losses.py.

losses = Losses(dialect)
sums = losses.policy_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef)
(sums.loss * weight).backward()      # weight: from `weights`, which needs the counts of all micro-batches and ranks
"""

from dataclasses import replace

from torch import Tensor

from engine.algo.losses import (
    PolicyLoss,
    ValueLoss,
    clipped_surrogate,
    clipped_value_loss,
    clipped_weight_loss,
    entropy_sum,
    kl_loss,
    loss_weights,
    masked_log_ratios,
    response_clipped_surrogate,
    response_log_ratios,
    shares_of_responses,
    soft_surrogate,
)
from engine.algo.rewards import valid_responses
from engine.algorithms.dialect import Dialect


class Losses:
    """The losses of policy and critic in one dialect.

    max_response_length: the largest number of tokens in a response; loss_scope "fixed_length" divides by it.
    """

    def __init__(self, dialect: Dialect, max_response_length: int | None = None):
        assert dialect.loss_scope != "fixed_length" or max_response_length, "loss_scope 'fixed_length' without a length"
        self.dialect, self.max_response_length = dialect, max_response_length

    def policy_loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        kl_coef: float,
        correction: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> PolicyLoss:
        """The policy's loss and statistics, summed over tokens, or over responses if the dialect has one ratio per
        response. `loss` includes the KL penalty if the dialect has kl_in "loss", and the entropy bonus if it has an
        `entropy_coef`. Both are sums over tokens, or over the responses' means if `loss` or ratio takes such means.

        Args:
            logprobs, old_logprobs, ref_logprobs, advantages: (B, T) float32. mask: (B, T) bool.
            correction: (B, T) float32, factors by which the clipped surrogate is multiplied, or None.
            entropy: (B, T) float32 of the policy being trained; needed with an `entropy_coef`.
        """
        dialect = self.dialect
        means, mean_ratio = dialect.loss_scope == "response", dialect.ratio == "response_mean"
        shares = shares_of_responses(mask) if means or mean_ratio else None
        given, high = (logprobs, old_logprobs, advantages, mask), dialect.clip_range_high
        if dialect.surrogate == "sapo":
            sums = soft_surrogate(*given, dialect.gate_temperatures, correction, weights=shares)
        elif dialect.surrogate == "cispo":
            sums = clipped_weight_loss(*given, dialect.clip_range, correction, clip_range_high=high, weights=shares)
        elif dialect.ratio == "token":
            sums = clipped_surrogate(
                *given,
                dialect.clip_range,
                correction,
                clip_range_high=high,
                dual_clip=dialect.dual_clip,
                weights=shares,
            )
        else:
            counted = valid_responses(mask, dialect.min_response_tokens)
            if mean_ratio:  # TRL: no mean of no ratios (GRPO); a product of no ratios is 1 (RLOO)
                counted = counted & mask.any(-1)
            sums = response_clipped_surrogate(
                logprobs,
                old_logprobs,
                advantages[:, 0],
                mask,
                dialect.clip_range,
                counted,
                None if correction is None else correction[:, 0],
                clip_range_high=high,
                dual_clip=dialect.dual_clip,
                mean=mean_ratio,
            )
        if dialect.kl_in == "loss":
            ratio = self._ratio(logprobs, old_logprobs, mask) if dialect.kl_times_ratio else None
            penalty = kl_loss(logprobs, ref_logprobs, mask, dialect.kl_estimator, ratio=ratio, weights=shares)
            sums = replace(sums, loss=sums.loss + kl_coef * penalty)
        if dialect.entropy_coef:
            assert entropy is not None, "an entropy_coef without the policy's entropies"
            bonus = entropy_sum(entropy, mask, weights=shares)
            sums = replace(sums, loss=sums.loss - dialect.entropy_coef * bonus)
        return sums

    def _ratio(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        """The ratio of new to old probabilities, with its gradient: (B, T), or (B, 1) if the dialect has one ratio per
        response."""
        if self.dialect.ratio == "token":
            return masked_log_ratios(logprobs, old_logprobs, mask).exp()
        mean = self.dialect.ratio == "response_mean"
        return response_log_ratios(logprobs, old_logprobs, mask, mean).exp().unsqueeze(-1)

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> ValueLoss:
        """The critic's loss and statistics, summed over the positions in the mask. values, old_values, returns: (B, T)
        float32. mask: (B, T) bool."""
        return clipped_value_loss(
            values, old_values, returns, mask, self.dialect.value_clip_range, self.dialect.value_factor
        )

    def policy_count(self, mask: Tensor) -> Tensor:
        """The number by which the dialect's `loss_scope` divides a policy loss that is summed over this mask, (B, T)
        bool: the number of tokens, the number of responses, or the number of responses times the fixed length. A scalar
        tensor."""
        dialect = self.dialect
        if dialect.ratio == "token" and dialect.loss_scope not in ("response", "fixed_length"):
            return mask.sum()
        count = valid_responses(mask, dialect.min_response_tokens).sum()
        if dialect.loss_scope == "fixed_length":
            assert self.max_response_length is not None
            return count * self.max_response_length
        return count

    def weights(self, counts: list[float], total: float, micro_batches: int, ranks: int) -> list[float]:
        """The factor by which each micro-batch's summed loss is multiplied: `loss_weights` with the dialect's
        `loss_scope`."""
        return loss_weights(counts, total, micro_batches, ranks, self.dialect.loss_scope)
