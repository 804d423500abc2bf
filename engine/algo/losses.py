"""Computes the losses of policy, critic and reward model, as sums and counts. Also has the conditions under which
updates are skipped.

Each function returns sums over tokens or responses, not means. Sums can be added up over micro-batches and ranks, and
the caller then divides once, by the count of the whole optimizer step.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.algo.kl import kl_estimate
from engine.algo.masked import masked_sum


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Sums over the tokens, or over the responses if each response has one ratio. Each field is a scalar tensor. Only
    `loss` has a gradient."""

    loss: Tensor
    clipped: Tensor  # how many terms have the clipped loss as the larger one; of CISPO how many ratios are clipped
    approxkl: Tensor  # (log ratio)^2 / 2, Schulman's k2 of old against new
    ratio: Tensor
    ratio_max: Tensor  # a maximum, not a sum
    count: Tensor  # the number of tokens or responses that are summed over


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Sums over the masked tokens. Each field is a scalar tensor. Only `loss` has a gradient."""

    loss: Tensor
    clipped: Tensor
    value: Tensor
    count: Tensor


def masked_log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_old, (B, T) float32, 0 outside the mask.

    Outside the mask the two log-probs may differ by any amount. Without the mask, the exp of their difference could
    overflow there and make the gradient NaN.
    """
    return torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))


def response_log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, mean: bool = False) -> Tensor:
    """For each response, the sum of the log-ratios of its tokens in the mask, (B,) float32. This is the log of the
    product of their ratios.

    mean: divide the sum by the number of tokens. The result is then the log of the ratios' geometric mean, which does
    not grow with the length.

    Source of the mean: Zheng et al. 2025, "Group sequence policy optimization", eq. 7.
    """
    total = masked_log_ratios(logprobs, old_logprobs, mask).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if mean else total


def shares_of_responses(mask: Tensor) -> Tensor:
    """The weights 1 / |o_i|, (B, 1) float32, where |o_i| is the number of tokens of response i in the mask. A sum over
    tokens with these weights is the sum of the responses' means."""
    return 1.0 / mask.sum(-1, keepdim=True).clamp(min=1)


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float,
    correction: Tensor | None = None,
    *,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate: sum over tokens of max(-A rho, -A clip(rho, 1 - clip_range, 1 + clip_range_high)).

    Args:
        logprobs: (B, T) float32 of the policy being trained.
        old_logprobs, advantages: (B, T) float32 of the rollout.
        mask: (B, T) bool.
        correction: (B, T) float32, a factor for each token's loss (engine/algo/corrections.py); None for the factor 1.
        clip_range_high: the upper clip range; None for `clip_range`. Source: Yu et al. 2025, "DAPO", section 3.1.
        dual_clip: an upper bound of rho, above 1 + clip_range_high, for tokens whose A is negative. The loss of
            such a token is at most -A dual_clip; where rho is over the bound, the loss has no gradient. None for no
            bound. Source: Ye et al. 2020, "Mastering complex control in MOBA games with deep reinforcement learning",
            eq. 5; `delta` of TRL 1.16.0's GRPO.
        weights: the weight of each token's loss, of a shape that broadcasts to (B, T); None for the weight 1. Only
            `loss` is weighted, not the statistics.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7.
    """
    log_ratio = masked_log_ratios(logprobs, old_logprobs, mask)
    high = clip_range if clip_range_high is None else clip_range_high
    return _surrogate_sums(log_ratio, advantages, mask, (clip_range, high), dual_clip, (correction, weights))


def response_clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float,
    counted: Tensor | None = None,
    correction: Tensor | None = None,
    *,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    mean: bool = False,
) -> PolicyLoss:
    """The clipped surrogate with one ratio per response, rho = exp(sum over its tokens of logprobs - old_logprobs).

    Args:
        logprobs, old_logprobs: (B, T) float32.
        advantages: (B,) float32, one for each response.
        mask: (B, T) bool.
        counted: (B,) bool, the responses that count; by default those with at least one token in the mask.
        correction: (B,) float32, as in `clipped_surrogate`. clip_range_high, dual_clip: as in `clipped_surrogate`.
        mean: whether rho is the geometric mean of the tokens' ratios instead of their product.

    Returns: sums over responses. Source: huggingface/trl v0.11.0, trl/trainer/rloo_trainer.py; for the mean Zheng et
    al. 2025, "Group sequence policy optimization", eq. 5 to 7.
    """
    log_ratio = response_log_ratios(logprobs, old_logprobs, mask, mean)
    high = clip_range if clip_range_high is None else clip_range_high
    counted = mask.any(-1) if counted is None else counted
    return _surrogate_sums(log_ratio, advantages, counted, (clip_range, high), dual_clip, (correction,))


def _surrogate_sums(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ranges: tuple[float, float],
    dual_clip: float | None,
    factors: tuple[Tensor | None, ...],
) -> PolicyLoss:
    """The clipped surrogate, summed over `mask`; `log_ratio` is 0 outside the mask. factors: as in `_sums`."""
    ratio, (low, high) = log_ratio.exp(), clip_ranges
    plain = -advantages * (ratio if dual_clip is None else ratio.clamp(max=dual_clip))
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return _sums(torch.maximum(plain, clipped), clipped > plain, log_ratio, mask, factors)


def clipped_weight_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float,
    correction: Tensor | None = None,
    *,
    clip_range_high: float | None = None,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """CISPO: sum over tokens of -sg(clip(rho, 1 - clip_range, 1 + clip_range_high)) A log pi. sg stops the gradient.

    The ratio rho is only a weight of the token's gradient. So each token keeps a gradient, however far its ratio is
    from 1. With a clip_range of 1 there is no lower bound. Arguments: as for `clipped_surrogate`.

    Source: MiniMax 2025, "MiniMax-M1" (arXiv 2506.13585), eq. 4 and 5; `loss_type` "cispo" of TRL 1.16.0's GRPO, whose
    `epsilon_high` is the upper bound itself, 1 + clip_range_high; `compute_policy_loss_cispo` of verl 0.9.1.
    """
    log_ratio = masked_log_ratios(logprobs, old_logprobs, mask)
    ratio, high = log_ratio.detach().exp(), clip_range if clip_range_high is None else clip_range_high
    weight = ratio.clamp(1 - clip_range, 1 + high)
    losses = -weight * advantages * torch.where(mask, logprobs, torch.zeros_like(logprobs))
    return _sums(losses, weight != ratio, log_ratio, mask, (correction, weights))


def soft_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    temperatures: tuple[float, float],
    correction: Tensor | None = None,
    *,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """SAPO: sum over tokens of -A (4 / tau) sigmoid(tau (rho - 1)).

    At rho = 1 the gradient is that of -A rho. It falls smoothly to 0 as rho moves away from 1 in either direction.

    Args:
        temperatures: tau of tokens whose A is positive, and tau of all others. The larger tau is, the sooner the
            gradient falls.

    The other arguments are those of `clipped_surrogate`. Source: Gao et al. 2025, "Soft adaptive policy optimization"
    (arXiv 2511.20347), eq. 5; `loss_type` "sapo" of TRL 1.16.0's GRPO; `compute_policy_loss_sapo` of verl 0.9.1.
    """
    log_ratio = masked_log_ratios(logprobs, old_logprobs, mask)
    positive, other = (torch.full_like(log_ratio, tau) for tau in temperatures)
    tau = torch.where(advantages > 0, positive, other)
    losses = -advantages * torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return _sums(losses, torch.zeros_like(mask), log_ratio, mask, (correction, weights))


def _sums(
    losses: Tensor, clipped: Tensor, log_ratio: Tensor, mask: Tensor, factors: tuple[Tensor | None, ...]
) -> PolicyLoss:
    """The sums over `mask` of the terms of a loss and of their statistics. clipped: which terms count as clipped, bool.
    factors: tensors by which each term of the loss is multiplied; None for the factor 1."""
    still = log_ratio.detach().exp()
    for factor in factors:
        losses = losses if factor is None else losses * factor
    return PolicyLoss(
        loss=masked_sum(losses, mask),
        clipped=masked_sum(clipped.float(), mask),
        approxkl=masked_sum(log_ratio.detach() ** 2 / 2, mask),
        ratio=masked_sum(still, mask),
        ratio_max=F.pad(torch.where(mask, still, torch.zeros_like(still)).flatten(), (0, 1)).max(),  # 0 of no rows
        count=mask.sum(),
    )


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: str,
    *,
    ratio: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Sum over masked tokens of the estimated KL(policy || reference): a penalty for the loss, not for the reward.

    The gradient flows through `logprobs` (lp). The expectation of k2's gradient, delta * grad lp, is the gradient of
    the KL. The expectation of k1's gradient, grad lp, is 0. The expectation of k3's gradient is the gradient of the KL
    with policy and reference exchanged.

    Args:
        logprobs: (B, T) float32 of the policy being trained; ref_logprobs (B, T) float32.
        mask: (B, T) bool.
        estimator: as in `kl_estimate`.
        ratio: (B, T) or (B, 1) float32, the ratio of the policy to the rollout's policy, finite everywhere, with its
            gradient. Each estimate is multiplied by the ratio. The expected gradients of k1 and k3 are then the KL's
            gradient too. None for the ratio 1.
        weights: as in `clipped_surrogate`.

    Source: Schulman 2020, "Approximating KL divergence"; Shao et al. 2024, "DeepSeekMath", eq. 4, which uses k3; for
    the ratio: DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1, and TRL 1.16.0, `use_bias_correction_kl`.
    """
    zeros = torch.zeros_like(logprobs)
    estimates = kl_estimate(torch.where(mask, logprobs, zeros), torch.where(mask, ref_logprobs, zeros), estimator)
    for factor in (ratio, weights):
        estimates = estimates if factor is None else estimates * factor
    return masked_sum(estimates, mask)


def entropy_sum(entropy: Tensor, mask: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Sum over masked tokens of the entropy of the policy's distribution. Times a coefficient, it is subtracted from
    the policy's loss.

    Args:
        entropy: (B, T) float32, in nats, of the policy being trained. mask: (B, T) bool.
        weights: as in `clipped_surrogate`.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 9, c2 S; `ent_coef` of openai/baselines
    (ppo2/model.py). For language models: `entropy_loss_coef` of OpenRLHF; `entropy_coeff` of volcengine/verl, averaged
    as the policy's loss is (`agg_loss`).
    """
    return masked_sum(entropy if weights is None else entropy * weights, mask)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float | None, factor: float = 1.0
) -> ValueLoss:
    """The clipped squared error of the critic's values: factor / 2 times the sum over positions of

        max((V - R)^2, (clip(V, V0 - clip_range, V0 + clip_range) - R)^2)

    If `clip_range` is None, the loss is factor / 2 times the sum of (V - R)^2.

    Args:
        values: (B, T) float32 of the critic being trained.
        old_values, returns: (B, T) float32 of the rollout.
        mask: (B, T) bool; some systems also count the position after the response.

    Source: openai/lm-human-preferences cbfd210b, train_policy.py, `loss`.
    """
    values = torch.where(mask, values, torch.zeros_like(values))  # as above: no gradient from outside the mask
    clipped = plain = (values - returns) ** 2
    if clip_range is not None:
        near = torch.minimum(torch.maximum(values, old_values - clip_range), old_values + clip_range)
        clipped = (near - returns) ** 2
    return ValueLoss(
        loss=0.5 * factor * masked_sum(torch.maximum(plain, clipped), mask),
        clipped=masked_sum((clipped > plain).float(), mask),
        value=masked_sum(values.detach(), mask),
        count=mask.sum(),
    )


def loss_weights(counts: list[float], total: float, micro_batches: int, ranks: int, scope: str) -> list[float]:
    """The factors by which a rank multiplies the loss sums of its micro-batches in one optimizer step.

    The gradient of the optimizer step is the gradient of the sum of these weighted losses over all micro-batches and
    ranks.

    Args:
        counts: for each micro-batch of this rank, the number that its loss sum is divided by: the number of tokens; the
            number of responses if each response has one ratio or one mean; or the number of responses times a fixed
            length.
        total: the sum of the counts of all ranks.
        micro_batches: the number of micro-batches of all ranks together.
        ranks: the number of ranks.
        scope: "optimizer_step", "response" and "fixed_length" divide by the counts of all ranks, so the result does not
            depend on the number of ranks and micro-batches; "micro_batch" takes the mean of the means of all
            micro-batches; "micro_batch_sum" sums the means of each rank's micro-batches, and takes the mean of the
            ranks' sums.

    Source of "micro_batch": the loss of DeepSpeed-Chat (DeepSpeedExamples 83757d9c) and of huggingface/trl f2cd5771,
    divided by the accumulation steps; of "micro_batch_sum": CarperAI/trlx 3340c2f3 with `minibatch_size`, not divided.
    """
    if scope in ("optimizer_step", "response", "fixed_length"):
        return [1.0 / max(total, 1.0)] * len(counts)
    if scope == "micro_batch":
        return [1.0 / (max(count, 1.0) * micro_batches) for count in counts]
    if scope == "micro_batch_sum":
        return [1.0 / (max(count, 1.0) * ranks) for count in counts]
    known = "optimizer_step, micro_batch, micro_batch_sum, response, fixed_length"
    raise ValueError(f"loss scope {scope!r}: known are {known}")


def ratio_exploded(ratio_sum: float, count: float, limit: float | None) -> bool:
    """Whether the mean ratio over the masked tokens (or responses) of a mini-batch is over `limit`. The caller then
    drops the mini-batch's losses.

    ratio_sum and count are sums over all ranks, so that all ranks decide alike. A mean that is not finite is over every
    limit. With the limit None no mini-batch is dropped.

    Source: huggingface/trl v0.11.0, trl/trainer/ppo_trainer.py, `loss` (its `ratio_threshold` is 10).
    """
    return limit is not None and not ratio_sum <= limit * max(count, 1)


def went_too_far(approxkl_sum: float, count: float, limit: float | None) -> bool:
    """Whether the policy is further than `limit` from the policy that sampled. The caller then skips the remaining PPO
    epochs.

    approxkl_sum: the sum of (log ratio)^2 / 2 over the `count` masked tokens of the latest pass, over all ranks. limit:
    the largest allowed mean of (log ratio)^2 / 2; with None no epoch is left out.

    Source: huggingface/trl v0.11.0, trl/trainer/ppo_trainer.py, `_early_stop` (which measures the mean of
    minus the log ratio, and whose limit is 1.5 x `target_kl`).
    """
    return limit is not None and not approxkl_sum <= limit * max(count, 1)


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The sum over pairs of -log sigmoid(chosen - rejected). chosen, rejected: (N,) float32, the scores of both texts
    of each pair.

    Source: Stiennon et al. 2020, "Learning to summarize from human feedback", section 3.4.
    """
    return -F.logsigmoid(chosen - rejected).sum()


def pairwise_loss_from_difference(chosen: Tensor, rejected: Tensor, mask: Tensor) -> Tensor:
    """The sum over pairs of the mean over tokens of -log sigmoid(chosen - rejected).

    Args:
        chosen, rejected: (N, S) float32, the scores at every token.
        mask: (N, S) bool, set from the first token in which the two sequences differ to the end of the longer sequence.

    Source: DeepSpeed-Chat's `RewardModel.forward` (DeepSpeedExamples 83757d9c).
    """
    losses = -F.logsigmoid(chosen - rejected)
    return (masked_sum(losses, mask, dim=-1) / mask.sum(-1).clamp(min=1)).sum()
