"""A dialect resolved, once, into the functions that a PPO step calls. After this nobody asks a dialect what it says.

    algorithm = Algorithm(get_dialect("default"), pad_token_id=0)
    slots = algorithm.slots(responses, response_mask)
    scores = algorithm.process_scores(scores, ended, response_mask)
    rewards = algorithm.compute_rewards(logprobs, ref_logprobs, scores, slots, kl_coef)
    values = algorithm.kept_values(values, slots)
    advantages, returns = algorithm.compute_advantages(rewards, values, slots.masks)

and in each micro-batch `policy_objective` and `value_objective`. The math is engine/algo's; here stands which of it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.algo.advantages import ESTIMATORS, AdvantageInputs, group_deviations, returns_to_go
from engine.algo.corrections import CORRECTIONS, outside
from engine.algo.kl import AdaptiveKL, FixedKL, kl_estimate, measured_kl
from engine.algo.losses import loss_weights, value_loss
from engine.algo.masked import mean_and_variance, moments, whiten
from engine.algo.rewards import compute_rewards, first_slots
from engine.algorithms.dialect import Dialect
from engine.algorithms.objectives import PolicyObjective
from engine.algorithms.scores import ScoreRules
from engine.algorithms.slots import ResponseRules
from engine.errors import RunStopped
from engine.experience import Experience, Masks, Rollout, Slots, TrainingBatch

Reduce = Callable[[Tensor], Tensor]


def _nothing_new(batch: TrainingBatch) -> TrainingBatch:
    return batch


class Algorithm:
    """What a dialect computes, as functions; `score_scale` is the one part that changes during a run.

    slots: which slots count, as `ResponseRules.slots`. texts: what is learned and what is scored, as its `texts`.
    learned: the masks of the responses that are learned from, as its `learned`.
    process_scores: scores as they enter the rewards, as `ScoreRules.process`; clipped, overlong: as there.
    measured_kl: (experience, slots) -> (B,) float32, nats, what the KL coefficient is steered by.
    policy_objective: (logprobs, old_logprobs, ref_logprobs, advantages (B, T) float32, mask (B, T) bool, kl_coef,
        correction (B, T) float32 or None) -> PolicyLoss, as `PolicyObjective`.
    value_objective: (values, old_values, returns (B, T) float32, mask (B, T) bool) -> ValueLoss.
    for_mini_batch, for_micro_batch: a TrainingBatch with advantages estimated anew where the dialect does so there
        (all ranks call these together), else as it is.
    schedule_position: (steps, optimizer steps, total steps, optimizer steps a step) -> (done, total), what learning
        rates go by.
    loss_weights: as `engine.algo.losses.loss_weights`, of the dialect's scope.
    sums_by_length: whether micro-batches may hold rows of similar length, because the gradient does not depend on
        which rows form one.

    Args:
        pad_token_id, end_token_id: as in ResponseRules.
        reduce: adds a float64 tensor up over all ranks; called equally often on each. None for one rank's own.
        ranks: how many there are.
        response_slots: how many slots a response may have; needed by loss_scope "fixed_length" and `overlong_buffer`.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        pad_token_id: int,
        end_token_id: int | None = None,
        reduce: Reduce | None = None,
        ranks: int = 1,
        response_slots: int | None = None,
    ):
        self.dialect, self.reduce = dialect, reduce
        rules = ResponseRules(dialect, pad_token_id, end_token_id)
        self.texts, self.scored_text, self.slots = rules.texts, rules.scored_text, rules.slots
        self.learned = rules.learned
        # What the experience is made with.
        self.needs_sampled_logprobs = dialect.old_logprobs == "sampler"
        self.kl_of_prompts = partial(measured_kl, measure=dialect.kl_measure) if dialect.measures_prompts else None
        # Scores and rewards.
        steered_by_responses = dialect.kl_measure == "k1"
        self.measured_kl = self._kl_of_responses if steered_by_responses else self._kl_of_prompts_and_responses
        scores = ScoreRules(dialect, response_slots, reduce)
        self.score_scale, self.process_scores, self.clipped = scores.scale, scores.process, scores.clipped
        self.missing_end_penalty, self.overlong = scores.missing_end_penalty, scores.overlong
        self._kl_in_reward = dialect.kl_in == "reward"
        # Advantages.
        self.estimator = ESTIMATORS[dialect.advantage_estimator]
        self._pool = self._row_of_all if dialect.whiten_slots == "row" else lambda masks, mask: mask
        self._unbiased = dialect.unbiased_variance(ranks)
        self._whitening_reduce = reduce if dialect.whiten_over == "all_ranks" else None
        self.for_mini_batch = self.with_advantages if dialect.advantages_at == "mini_batch" else _nothing_new
        self.for_micro_batch = self.with_advantages if dialect.advantages_at == "micro_batch" else _nothing_new
        # Objectives.
        self._correction = CORRECTIONS.get(dialect.correction)
        self.policy_objective = PolicyObjective(dialect, self.valid_responses, response_slots)
        self.value_objective = partial(value_loss, clip_range=dialect.value_clip_range, factor=dialect.value_factor)
        self.loss_weights = partial(loss_weights, scope=dialect.loss_scope)
        self.sums_by_length = not dialect.micro_batches_matter
        by_optimizer_step = dialect.lr_per == "optimizer_step"
        self.schedule_position = self._in_optimizer_steps if by_optimizer_step else self._in_steps

    @staticmethod
    def _in_steps(steps: int, optimizer_steps: int, total_steps: int, updates: int) -> tuple[int, int]:
        """How far learning rates have come: (done, total), from the run's steps and optimizer steps so far."""
        return steps, total_steps

    @staticmethod
    def _in_optimizer_steps(steps: int, optimizer_steps: int, total_steps: int, updates: int) -> tuple[int, int]:
        return optimizer_steps, total_steps * updates

    def kl_controller(self) -> FixedKL | AdaptiveKL:
        """The controller of the KL coefficient, at its start."""
        dialect = self.dialect
        if dialect.kl_controller == "fixed":
            return FixedKL(dialect.kl_coef)
        return AdaptiveKL(dialect.kl_coef, dialect.kl_target, dialect.kl_horizon, dialect.kl_update)

    @staticmethod
    def _kl_of_responses(experience: Experience, slots: Slots) -> Tensor:
        """The KL of each response that the coefficient is steered by, (B,) float32, in nats."""
        return experience.kl.sum(-1)

    def _kl_of_prompts_and_responses(self, experience: Experience, slots: Slots) -> Tensor:
        measure = self.dialect.kl_measure
        return experience.prompt_kl + measured_kl(experience.logprobs, experience.ref_logprobs, slots.kl_mask, measure)

    def compute_rewards(
        self, logprobs: Tensor, ref_logprobs: Tensor, scores: Tensor, slots: Slots, kl_coef: float
    ) -> Tensor:
        """The reward of every token, (B, T) float32: the KL penalty, and the score on one slot.

        Args:
            logprobs, ref_logprobs: (B, T) float32 of the rollout. scores: (B,) float32, from `process_scores`.
        """
        penalty = kl_estimate(logprobs, ref_logprobs, self.dialect.kl_estimator)
        return compute_rewards(penalty, kl_coef if self._kl_in_reward else 0.0, slots.kl_mask, scores, slots.score_slot)

    def kept_values(self, values: Tensor | None, slots: Slots) -> Tensor:
        """The critic's values (B, T) float32 with what the dialect has after the end; zeros without a critic."""
        state = slots.masks.state
        if values is None:
            return torch.zeros(state.shape, device=state.device)
        return torch.where(state, values, torch.zeros_like(values))

    def compute_advantages(self, rewards: Tensor, values: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        """Advantages and returns of the rows given, (B, T) float32 each, whitened over them, or over all ranks'.

        An estimator of one number a response has it on every slot of its row. All ranks call this together.

        Args:
            rewards: (B, T) float32, from `compute_rewards`. values: (B, T) float32, from `kept_values`.
        """
        dialect, valid = self.dialect, self.valid_responses(masks.policy)
        advantages, returns = self.estimates(rewards, values, masks)
        if dialect.advantage_scale != "none":
            advantages = advantages / (self._deviations(returns, valid) + dialect.scale_eps)
        if dialect.whiten_advantages:
            pool = valid if self.estimator.per_response else self._pool(masks, masks.policy)
            advantages = self._white(advantages, pool, center=True)
        if self.estimator.per_response:
            advantages, returns = (one.unsqueeze(-1).expand_as(rewards).clone() for one in (advantages, returns))
        return advantages, returns

    def estimates(self, rewards: Tensor, values: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        """What the estimator gives, advantages and returns before they are whitened; as `compute_advantages`."""
        dialect = self.dialect
        return self.estimator.compute(
            AdvantageInputs(
                rewards=self._learned_rewards(rewards, masks),
                values=values,
                policy_mask=masks.policy,
                valid=self.valid_responses(masks.policy),
                group_size=dialect.samples_per_prompt,
                gamma=dialect.gamma,
                lam=dialect.lam,
                value_lam=dialect.value_lam,
                length_adaptive_alpha=dialect.length_adaptive_alpha,
            )
        )

    def outcomes(self, rewards: Tensor, masks: Masks) -> Tensor:
        """What really follows each slot, (B, T) float32: returns without a value in them (all ranks call this)."""
        return returns_to_go(self._learned_rewards(rewards, masks), self.dialect.gamma)

    def _learned_rewards(self, rewards: Tensor, masks: Masks) -> Tensor:
        if not self.dialect.whiten_rewards:
            return rewards
        return self._white(rewards, self._pool(masks, masks.value), center=False)

    def with_advantages(self, batch: TrainingBatch) -> TrainingBatch:
        """These rows with advantages and returns anew from their rewards and values (all ranks call this together)."""
        advantages, returns = self.compute_advantages(batch.rewards, batch.values, batch.masks)
        return replace(batch, advantages=advantages, returns=returns)

    def _deviations(self, rewards: Tensor, valid: Tensor) -> Tensor:
        """The standard deviation by which each response's advantage is divided, (B,) or a scalar: its group's, or that
        of all ranks' responses. rewards: (B,) float32."""
        unbiased = self.dialect.scale_variance == "unbiased"
        if self.dialect.advantage_scale == "group":
            return group_deviations(rewards, self.dialect.samples_per_prompt, valid, unbiased=unbiased)
        totals = moments(rewards, valid)
        _, variance = mean_and_variance(self.reduce(totals) if self.reduce else totals, unbiased)
        return variance.sqrt().to(rewards.dtype)

    def _white(self, tensor: Tensor, mask: Tensor, center: bool) -> Tensor:
        totals = moments(tensor, mask)
        totals = self._whitening_reduce(totals) if self._whitening_reduce else totals
        return whiten(tensor, mask, center=center, statistics=mean_and_variance(totals, self._unbiased))

    @staticmethod
    def _row_of_all(masks: Masks, mask: Tensor) -> Tensor:
        """Up to the end of the longest row, as the system pads them."""
        return first_slots(masks.state.sum(-1).amax().expand(len(mask)), mask.shape[1])

    def valid_responses(self, policy_mask: Tensor) -> Tensor:
        """(B,) bool, the responses that count where each has one number: those with a slot in policy_mask (B, T).

        A dialect that learns responses of any length counts those without a token too: they have a score, with which
        others are compared, and a ratio of 1.
        """
        return policy_mask.any(-1) | (self.dialect.min_response_tokens == 0)

    def correction(self, logprobs: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor] | None:
        """What the policy's loss is multiplied by because another policy drew, (B, T) float32, and which ratios were
        cut for it, (B, T) bool; None in a dialect without correction.

        Args:
            logprobs: (B, T) float32, of the actor's forward pass.

        Raises: RunStopped where the rollout has no log-probs of the sampler.
        """
        if self._correction is None:
            return None
        dialect = self.dialect
        if rollout.logprobs is None:
            raise RunStopped(
                f"correction {dialect.correction!r} compares the sampler's log-probs with the actor's, and this "
                "rollout backend notes none. Take another --rollout_backend, or --set correction=none."
            )
        ratios = self._correction.ratios(logprobs - rollout.logprobs, rollout.response_mask)
        bounds = dialect.correction_min, dialect.correction_max
        return self._correction.cut(ratios, *bounds), outside(ratios, *bounds)
