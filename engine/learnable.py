"""What a dialect makes of the models' answers: slots, rewards, values, advantages, losses. The math is engine/algo's.

At the rollout, row by row:

    slots = count_slots(responses, scored_mask, pad_token_id, dialect)
    scores = process_scores(scores, ended, dialect, scale, reduce)
    rewards, values = token_rewards(logprobs, ref_logprobs, values, scores, slots, kl_coef, dialect)

then, over the rows that `dialect.advantages_at` names, "rollout", "mini_batch" or "micro_batch":

    advantages, returns = estimate_advantages(rewards, values, masks, dialect, reduce, ranks)

and in each micro-batch `actor_loss` and `critic_loss`. `reduce` adds a float64 tensor up over all ranks, and is called
equally often on each; it is `engine.distributed.all_reduce_sum` in a run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.algo.advantages import gae, rloo
from engine.algo.kl import AdaptiveKL, FixedKL, kl_estimate
from engine.algo.losses import PolicyLoss, ValueLoss, kl_loss, policy_loss, response_policy_loss, value_loss
from engine.algo.masked import mean_and_variance, moments, whiten
from engine.algo.rewards import compute_rewards, counted_tokens, first_slots, score_slots, slots_up_to
from engine.algo.scores import ScoreScale, apply_missing_end, clip_scores
from engine.algo.truncation import has_end, kept_slots
from engine.algorithms import Dialect

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Masks:
    """(B, T) bool each: the slots of the policy's loss, those of the critic's, and those whose values are kept."""

    policy: Tensor
    value: Tensor
    state: Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """Which slots count for what: lengths (B,) int64, L; score (B,) int64; kl (B, T) bool; masks."""

    lengths: Tensor
    score: Tensor
    kl: Tensor
    masks: Masks


def scored_text(
    responses: Tensor, response_mask: Tensor, ended: Tensor, dialect: Dialect, end_token: int | None
) -> tuple[Tensor, Tensor]:
    """What of each response is scored, (B, T) bool, and whether it has the end it should have, (B,) bool.

    Args:
        responses: (B, T) int64.
        response_mask: (B, T) bool, set on every sampled token.
        ended: (B,) bool, whether the sampler met a stop.
        end_token: the id of the dialect's `truncate_token`; without one that of EOS, or None if there is no EOS.
    """
    sampled = torch.where(response_mask, responses, -1)
    if dialect.truncate_token:
        assert end_token is not None, f"truncate_token {dialect.truncate_token!r} without its id"
        return (
            response_mask & kept_slots(sampled, end_token, dialect.truncate_after),
            has_end(sampled, end_token, dialect.truncate_after),
        )
    if dialect.sampling == "until_eos" or end_token is None:
        return response_mask, ended
    return response_mask, has_end(sampled, end_token)


def count_slots(responses: Tensor, scored_mask: Tensor, pad_token_id: int, dialect: Dialect) -> Slots:
    """The dialect's lengths, score slots and masks.

    Args:
        responses: (B, T) int64, as wide as the system's own would be: its rows end with the longest response of the
            batch that was generated together, or after a fixed length. Wider rows move the score of some systems.
        scored_mask: (B, T) bool, from `scored_text`.
    """
    width = responses.shape[1]
    counted = counted_tokens(responses, scored_mask, pad_token_id, dialect.length_rule)
    lengths = counted.sum(-1)
    learned = (lengths >= dialect.min_response_tokens).unsqueeze(-1)
    value = counted if dialect.value_loss_slots == "response" else first_slots(lengths + 1, width)
    return Slots(
        lengths=lengths,
        score=score_slots(lengths, width, dialect.score_slot),
        kl=slots_up_to(lengths, width, dialect.reward_slots),
        masks=Masks(counted & learned, value & learned, slots_up_to(lengths, width, dialect.value_slots)),
    )


def process_scores(
    scores: Tensor, ended: Tensor, dialect: Dialect, scale: ScoreScale, reduce: Reduce | None = None
) -> Tensor:
    """The scores (B,) float32 as they enter the rewards: scaled, lowered where an end is missing, clipped.

    scale: takes note of these scores before they are divided by it.
    """

    def scaled(values: Tensor) -> Tensor:
        if scale.kind == "none":
            return values
        totals = moments(values, torch.ones_like(values, dtype=torch.bool))
        scale.update(reduce(totals) if reduce else totals)
        return values / scale.value

    def with_ends(values: Tensor) -> Tensor:
        return apply_missing_end(values, ended, dialect.missing_end, dialect.missing_end_value)

    if dialect.score_order == "clip_scale":
        return with_ends(scaled(clip_scores(scores, dialect.score_clip)))
    return clip_scores(with_ends(scaled(scores)), dialect.score_clip)


def token_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor | None,
    scores: Tensor,
    slots: Slots,
    kl_coef: float,
    dialect: Dialect,
) -> tuple[Tensor, Tensor]:
    """Rewards and values, (B, T) float32 each, with what the dialect has after the end; values of None become zeros.

    Args:
        logprobs, ref_logprobs, values: (B, T) float32 of the rollout.
        scores: (B,) float32, from `process_scores`.
    """
    penalty = kl_estimate(logprobs, ref_logprobs, dialect.kl_estimator)
    coefficient = kl_coef if dialect.kl_in == "reward" else 0.0
    rewards = compute_rewards(penalty, coefficient, slots.kl, scores, slots.score)
    zeros = torch.zeros_like(rewards)
    return rewards, zeros if values is None else torch.where(slots.masks.state, values, zeros)


def estimate_advantages(
    rewards: Tensor, values: Tensor, masks: Masks, dialect: Dialect, reduce: Reduce | None = None, ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the rows given, (B, T) float32 each, whitened over them and, if so, over all ranks.

    With RLOO every slot of a row holds its response's one advantage and one return; groups stand side by side.

    Args:
        rewards, values: (B, T) float32, from `token_rewards`.
        reduce, ranks: where statistics are taken over all ranks; without `reduce` they are these rows' own.
    """
    reduce = reduce if dialect.whiten_over == "all_ranks" else None

    def white(tensor: Tensor, mask: Tensor, center: bool) -> Tensor:
        totals = moments(tensor, mask)
        statistics = mean_and_variance(reduce(totals) if reduce else totals, dialect.unbiased_variance(ranks))
        return whiten(tensor, mask, center=center, statistics=statistics)

    if dialect.advantage_estimator == "rloo":
        valid, totals = counted_responses(masks.policy, dialect), rewards.sum(-1)
        responses = rloo(totals, dialect.samples_per_prompt, valid)
        if dialect.whiten_advantages:
            responses = white(responses, valid, center=True)
        return responses.unsqueeze(-1).expand_as(rewards).clone(), totals.unsqueeze(-1).expand_as(rewards).clone()
    in_row = dialect.whiten_slots == "row"  # up to the end of the longest row, as the system pads them
    row = first_slots(masks.state.sum(-1).amax().expand(len(rewards)), rewards.shape[1]) if in_row else None
    if dialect.whiten_rewards:
        rewards = white(rewards, row if in_row else masks.value, center=False)
    advantages, returns = gae(rewards, values, dialect.gamma, dialect.lam)
    if dialect.whiten_advantages:
        advantages = white(advantages, row if in_row else masks.policy, center=True)
    return advantages, returns


def counted_responses(policy_mask: Tensor, dialect: Dialect) -> Tensor:
    """(B,) bool, the responses that count where each has one advantage: those with a slot in Masks.policy (B, T).

    A dialect that learns responses of any length counts those without a token too: they have a score, with which others
    are compared, and a ratio of 1.
    """
    return policy_mask.any(-1) | (dialect.min_response_tokens == 0)


def actor_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kl_coef: float,
    dialect: Dialect,
) -> PolicyLoss:
    """The policy's loss as sums over tokens, or over responses where the ratio is theirs; with the KL if it is there.

    Args:
        logprobs: (B, T) float32 of the policy being trained; old_logprobs, ref_logprobs, advantages of the rollout.
        mask: (B, T) bool, Masks.policy.
    """
    if dialect.ratio == "response":
        sums = response_policy_loss(
            logprobs, old_logprobs, advantages[:, 0], mask, dialect.clip_range, counted_responses(mask, dialect)
        )
    else:
        sums = policy_loss(logprobs, old_logprobs, advantages, mask, dialect.clip_range)
    if dialect.kl_in == "reward":
        return sums
    return replace(sums, loss=sums.loss + kl_coef * kl_loss(logprobs, ref_logprobs, mask, dialect.kl_estimator))


def critic_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, dialect: Dialect) -> ValueLoss:
    """The critic's loss as sums over slots; (B, T) float32 each, mask (B, T) bool, Masks.value."""
    return value_loss(values, old_values, returns, mask, dialect.value_clip_range, dialect.value_factor)


def kl_controller(dialect: Dialect) -> FixedKL | AdaptiveKL:
    """The controller of the dialect's KL coefficient, at its start."""
    if dialect.kl_controller == "fixed":
        return FixedKL(dialect.kl_coef)
    return AdaptiveKL(dialect.kl_coef, dialect.kl_target, dialect.kl_horizon)
