"""A dialect's policy loss: which ratio it has, how that is clipped, where the KL stands, what its sum is divided by."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from engine.algo.losses import (
    PolicyLoss,
    kl_loss,
    masked_log_ratios,
    policy_loss,
    response_log_ratios,
    response_policy_loss,
    shares_of_responses,
)
from engine.algorithms.dialect import Dialect


class PolicyObjective:
    """Called with a micro-batch, gives its PolicyLoss: sums over tokens, or over responses where the ratio is theirs.

    Args:
        valid_responses: as of Algorithm.
        response_slots: how many slots a response may have, by which loss_scope "fixed_length" divides.
    """

    def __init__(self, dialect: Dialect, valid_responses: Callable[[Tensor], Tensor], response_slots: int | None):
        assert dialect.loss_scope != "fixed_length" or response_slots, "loss_scope 'fixed_length' without a length"
        self.dialect, self._valid_responses = dialect, valid_responses
        self._by_response, self._mean_ratio = dialect.ratio != "token", dialect.ratio == "response_mean"
        self._clip = {"clip_range_high": dialect.clip_range_high, "dual_clip": dialect.dual_clip}
        self._means = dialect.loss_scope == "response"
        self._counts_responses = self._by_response or dialect.loss_scope in ("response", "fixed_length")
        self._length = response_slots if response_slots and dialect.loss_scope == "fixed_length" else 1

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        kl_coef: float,
        correction: Tensor | None = None,
    ) -> PolicyLoss:
        """The sums, with the KL in `loss` where the dialect has it there.

        Args:
            logprobs, old_logprobs, ref_logprobs, advantages: (B, T) float32. mask: (B, T) bool.
            correction: (B, T) float32, what the surrogate is multiplied by, or None.
        """
        surrogate = self._of_responses if self._by_response else self._of_tokens
        sums = surrogate(logprobs, old_logprobs, advantages, mask, correction)
        if self.dialect.kl_in == "reward":
            return sums
        penalty = kl_loss(
            logprobs,
            ref_logprobs,
            mask,
            self.dialect.kl_estimator,
            ratio=self._ratio(logprobs, old_logprobs, mask) if self.dialect.kl_times_ratio else None,
            weights=shares_of_responses(mask) if self._means or self._mean_ratio else None,
        )
        return replace(sums, loss=sums.loss + kl_coef * penalty)

    def count(self, mask: Tensor) -> Tensor:
        """What a sum over these slots (B, T), bool, is divided by in the mean that `loss_scope` takes; a scalar."""
        return self._valid_responses(mask).sum() * self._length if self._counts_responses else mask.sum()

    def _of_tokens(self, logprobs, old_logprobs, advantages, mask, correction) -> PolicyLoss:
        return policy_loss(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            self.dialect.clip_range,
            correction,
            weights=shares_of_responses(mask) if self._means else None,
            **self._clip,
        )

    def _of_responses(self, logprobs, old_logprobs, advantages, mask, correction) -> PolicyLoss:
        # A product of no ratios is 1, as TRL's RLOO has it; a mean of none is nothing, as its GRPO has it.
        valid = self._valid_responses(mask)
        counted = valid & mask.any(-1) if self._mean_ratio else valid
        return response_policy_loss(
            logprobs,
            old_logprobs,
            advantages[:, 0],
            mask,
            self.dialect.clip_range,
            counted,
            None if correction is None else correction[:, 0],
            mean=self._mean_ratio,
            **self._clip,
        )

    def _ratio(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        """(B, T), or (B, 1) where a response has one; with its gradient."""
        if self._by_response:
            return response_log_ratios(logprobs, old_logprobs, mask, self._mean_ratio).exp().unsqueeze(-1)
        return masked_log_ratios(logprobs, old_logprobs, mask).exp()
