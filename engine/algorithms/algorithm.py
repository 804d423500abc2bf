"""The computations of a PPO step: which text counts, scores, rewards, advantages, and the batch for the optimizer
steps.

    algorithm = Algorithm(get_dialect("default"), pad_token_id=0)
    positions = algorithm.positions(rollout.responses, rollout.response_mask, rollout.action_mask)
    scores = algorithm.process_scores(experience.scores, rollout.ended, rollout.actions)
    rewards = algorithm.compute_rewards(experience.logprobs, experience.ref_logprobs, scores, positions, kl_coef)
    values = algorithm.kept_values(experience.values, positions)
    advantages, returns = algorithm.compute_advantages(rewards, values, positions.masks)

Each method chooses formulas by the dialect. The formulas are in engine/algo/, the losses of the optimizer steps in
engine/algorithms/losses.py. Shapes: B responses of this rank, T response positions. Position t belongs to response
token t: it holds the log-prob of token t and the value of the state before token t.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.algo.advantages import ESTIMATORS, AdvantageInputs, group_deviations, returns_to_go
from engine.algo.corrections import CORRECTIONS
from engine.algo.kl import AdaptiveKL, FixedKL, kl_estimate, measured_kl
from engine.algo.masked import mean_and_variance, moments, whiten
from engine.algo.rewards import (
    ScoreScale,
    apply_missing_end,
    clip_scores,
    counted_tokens,
    first_positions,
    in_place,
    last_positions,
    likelihood_part,
    marked_first,
    overlong_penalties,
    positions_after_tokens,
    positions_up_to,
    score_positions,
    token_rewards,
    valid_responses,
)
from engine.algo.truncation import has_end, kept_positions
from engine.algorithms.checks import check_conversations
from engine.algorithms.dialect import Dialect
from engine.algorithms.losses import Losses
from engine.errors import RunStopped
from engine.experience import Experience, Masks, Positions, Rollout, TrainingBatch

Reduce = Callable[[Tensor], Tensor]


class Algorithm:
    """A dialect's computations on the responses of one rank.

    losses: the losses of the optimizer steps. score_scale: the divisor of scores. likelihood_scale: mean and deviation
    of the first responses' likelihoods. These two are the only state of an Algorithm that changes in a run.

    Args:
        pad_token_id: the token at positions after a response.
        end_token_id: the token that the dialect's `truncate_token` names. If it names none, this is EOS, or None if the
            tokenizer has no EOS.
        reduce: a function that sums a float64 tensor over all ranks. All ranks call it equally often. The default is
            right for one rank.
        ranks: the number of ranks.
        max_response_length: the largest number of tokens in a response; needed for loss_scope "fixed_length" and for
            `overlong_buffer`.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        pad_token_id: int,
        end_token_id: int | None = None,
        reduce: Reduce = lambda totals: totals,
        ranks: int = 1,
        max_response_length: int | None = None,
    ):
        assert not dialect.truncate_token or end_token_id is not None, (
            f"truncate_token {dialect.truncate_token!r} without its id"
        )
        assert not dialect.overlong_buffer or max_response_length, "an overlong_buffer without the responses' length"
        self.dialect = dialect
        self.pad_token_id = pad_token_id
        self.end_token_id = end_token_id
        self.reduce = reduce
        self.ranks = ranks
        self.max_response_length = max_response_length
        self.estimator = ESTIMATORS[dialect.advantage_estimator]
        self.score_scale = ScoreScale(dialect.score_scaling)
        self.likelihood_scale = ScoreScale("first_batch")
        self.losses = Losses(dialect, max_response_length)

    # Which text is learned from, which is scored, and which positions count.

    def texts(self, rollout: Rollout) -> tuple[Rollout, Rollout]:
        """Returns (the rollout that is learned from, the rollout that is scored).

        The two rollouts differ only if the dialect learns from all sampled tokens (length_rule "row"), or reads the
        score before the first pad token (score_before_pad). With length_rule "not_pad" the attention mask is `ids !=
        pad`, which means that no token of a prompt or response attends to a pad token.

        Raises: UserError for a conversation in a dialect that takes none.
        """
        dialect = self.dialect
        if rollout.action_mask is not None:
            check_conversations(dialect)
        kept, ended = self.scored_text(rollout.responses, rollout.response_mask, rollout.ended)
        if dialect.length_rule == "not_pad":
            rollout = rollout.without_attention_to(self.pad_token_id)
        if dialect.length_rule == "row":
            learned = replace(rollout, ended=ended)
        else:
            learned = rollout.cut(kept, ended, self.pad_token_id)
        if dialect.score_before_pad:
            kept = counted_tokens(rollout.responses, kept, self.pad_token_id, "before_pad")
        return learned, rollout.cut(kept, ended, self.pad_token_id)

    def scored_text(self, responses: Tensor, mask: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a mask of the positions that are scored, (B, T) bool, and whether each response has the end that the
        dialect requires, (B,) bool.

        Args:
            responses: (B, T) int64. mask: (B, T) bool, the sampled tokens. ended: (B,) bool, whether the sampler
                reached an end.
        """
        dialect, token = self.dialect, self.end_token_id
        if token is None or (dialect.sampling == "until_eos" and not dialect.truncate_token):
            return mask, ended
        sampled = torch.where(mask, responses, -1)
        if not dialect.truncate_token:
            return mask, has_end(sampled, token)
        after = dialect.truncate_after
        return mask & kept_positions(sampled, token, after), has_end(sampled, token, after)

    def positions(self, responses: Tensor, response_mask: Tensor, action_mask: Tensor | None = None) -> Positions:
        """How long each response is, which position gets its score, and which positions count for KL, losses and
        values.

        Args:
            responses: (B, T) int64. T must be the width of the rows in the system that the dialect follows: the length
                of the longest response generated in the batch, or a fixed length. In some dialects wider rows would
                move the score to another position.
            response_mask: (B, T) bool, the tokens that are learned from.
            action_mask: (B, T) bool, the tokens that the policy drew, if others were inserted. Then they alone count.
        """
        dialect, width = self.dialect, responses.shape[1]
        if action_mask is not None:  # check_conversations refuses dialects that count other positions
            counted = kl_mask = value = state = action_mask & response_mask
            lengths, score = counted.sum(-1), last_positions(counted)
        else:
            counted = counted_tokens(responses, response_mask, self.pad_token_id, dialect.length_rule)
            lengths = counted.sum(-1)
            if dialect.kl_positions == "after_tokens":
                kl_mask = positions_up_to(lengths, width, "two_past") & positions_after_tokens(counted)
            else:
                kl_mask = positions_up_to(lengths, width, dialect.kl_positions)
            value = counted if dialect.value_loss_positions == "response" else first_positions(lengths + 1, width)
            state = positions_up_to(lengths, width, dialect.value_positions)
            score = score_positions(lengths, width, dialect.score_position)
        long_enough = (lengths >= dialect.min_response_tokens).unsqueeze(-1)
        masks = Masks(policy=counted & long_enough, value=value & long_enough, state=state)
        return Positions(lengths=lengths, score=score, kl_mask=kl_mask, masks=masks)

    def valid_responses(self, policy_mask: Tensor) -> Tensor:
        """Whether each response counts in statistics that take one number from each response: (B,) bool. policy_mask:
        (B, T) bool."""
        return valid_responses(policy_mask, self.dialect.min_response_tokens)

    # Scores, and the rewards of all tokens.

    def process_scores(
        self, scores: Tensor, ended: Tensor, actions: Tensor | None = None, likelihoods: Tensor | None = None
    ) -> Tensor:
        """The scores that enter the rewards, (B,) float32. Each score is scaled, changed if the response has no end,
        clipped, and reduced by the penalty for a long response. Then the likelihood's part is added.

        The scales are updated with these numbers before they are divided by them (all ranks call this together).

        Args:
            scores: (B,) float32, from the reward source. ended: (B,) bool, whether each response has the end that the
                dialect requires.
            actions: (B, T) bool, the drawn tokens; needed in dialects with an `overlong_buffer`.
            likelihoods: (B,) float32, from `mean_logprobs` of the reference; needed in dialects with a
                `likelihood_coef`.
        """
        dialect = self.dialect
        if dialect.score_order == "clip_scale":
            scores = clip_scores(scores, dialect.score_clip)
        if dialect.score_scaling != "none":
            self.score_scale.update(self.reduce(moments(scores, torch.ones_like(scores, dtype=torch.bool))))
            scores = scores / self.score_scale.value
        scores = apply_missing_end(scores, ended, dialect.missing_end, dialect.missing_end_value)
        if dialect.score_order == "scale_clip":
            scores = clip_scores(scores, dialect.score_clip)
        if dialect.overlong_buffer:
            assert actions is not None, "an overlong_buffer without the responses' lengths"
            scores = scores + self.overlong_penalties(actions.sum(-1))
        if dialect.likelihood_coef:
            assert likelihoods is not None, "a likelihood_coef without the responses' likelihoods"
            everywhere = torch.ones_like(likelihoods, dtype=torch.bool)
            self.likelihood_scale.update(self.reduce(moments(likelihoods, everywhere)))
            scores = scores + self.likelihood_part(likelihoods)
        return scores

    def likelihood_part(self, likelihoods: Tensor) -> Tensor:
        """What is added to the scores in dialects with a `likelihood_coef`: (B,) float32. Like the score, but apart
        from it, the part is clipped. likelihoods: as in `process_scores`, which has to be called first."""
        dialect, scale = self.dialect, self.likelihood_scale
        part = likelihood_part(likelihoods, scale.mean, scale.value, dialect.likelihood_coef, dialect.likelihood_cap)
        return clip_scores(part, dialect.score_clip)

    def overlong_penalties(self, lengths: Tensor) -> Tensor:
        """The penalties, 0 or negative, that are added to the scores in dialects with an `overlong_buffer`: (B,)
        float32. lengths: (B,) int64, the number of drawn tokens of each response."""
        assert self.max_response_length is not None
        dialect = self.dialect
        return overlong_penalties(lengths, self.max_response_length, dialect.overlong_buffer, dialect.overlong_penalty)

    def clipped(self, scores: Tensor) -> Tensor | None:
        """Whether each score from the reward source is clipped, given the present scale: (B,) bool. None in a dialect
        that does not clip scores."""
        if self.dialect.score_clip is None:
            return None
        scale = self.score_scale.value if self.dialect.score_order == "scale_clip" else 1.0
        return (scores / scale).abs() > self.dialect.score_clip

    def compute_rewards(
        self, logprobs: Tensor, ref_logprobs: Tensor, scores: Tensor, positions: Positions, kl_coef: float
    ) -> Tensor:
        """The reward of every token, (B, T) float32: the KL penalty of the token, plus the response's score at one
        position.

        Args:
            logprobs, ref_logprobs: (B, T) float32 of the rollout. scores: (B,) float32, from `process_scores`.
        """
        kl = kl_estimate(logprobs, ref_logprobs, self.dialect.kl_estimator)
        coefficient = kl_coef if self.dialect.kl_in == "reward" else 0.0
        return token_rewards(kl, coefficient, positions.kl_mask, scores, positions.score)

    # Values, advantages and returns.

    def kept_values(self, values: Tensor | None, positions: Positions) -> Tensor:
        """The critic's values, (B, T) float32, set to 0 at positions that the dialect does not keep. Zeros without a
        critic (values None)."""
        state = positions.masks.state
        if values is None:
            return torch.zeros(state.shape, device=state.device)
        return torch.where(state, values, torch.zeros_like(values))

    def compute_advantages(self, rewards: Tensor, values: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        """Advantages and returns of these rows, (B, T) float32 each. A dialect that whitens advantages whitens over
        these rows, or over the rows of all ranks.

        If the estimator returns one number per response, that number is repeated at every position. All ranks call this
        together.

        Args:
            rewards: (B, T) float32, from `compute_rewards`. values: (B, T) float32, from `kept_values`.
        """
        dialect, valid = self.dialect, self.valid_responses(masks.policy)
        advantages, returns = self.estimates(rewards, values, masks)
        if dialect.advantage_scale != "none":
            advantages = advantages / (self._deviations(returns, valid) + dialect.scale_eps)
        if dialect.whiten_advantages:
            pool = valid if self.estimator.per_response else self._whitened_together(masks, masks.policy)
            advantages = self._whitened(advantages, pool, center=True)
        if self.estimator.per_response:
            advantages, returns = (one.unsqueeze(-1).expand_as(rewards).clone() for one in (advantages, returns))
        return advantages, returns

    def estimates(self, rewards: Tensor, values: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        """The advantages and returns that the estimator computes, before the advantages are scaled and whitened.

        The estimator gets the positions in `masks.state` side by side, so that no time passes at inserted tokens.
        Arguments: as in `compute_advantages`."""
        dialect, order = self.dialect, marked_first(masks.state)
        advantages, returns = self.estimator.compute(
            AdvantageInputs(
                rewards=self._learned_rewards(rewards, masks).gather(1, order),
                values=values.gather(1, order),
                policy_mask=masks.policy.gather(1, order),
                valid=self.valid_responses(masks.policy),
                group_size=dialect.samples_per_prompt,
                gamma=dialect.gamma,
                lam=dialect.lam,
                value_lam=dialect.value_lam,
                length_adaptive_alpha=dialect.length_adaptive_alpha,
            )
        )
        shape = rewards.shape[:1] if self.estimator.per_response else rewards.shape
        for one in (advantages, returns):
            assert one.shape == shape, (
                f"estimator {dialect.advantage_estimator} with per_response={self.estimator.per_response} returned "
                f"{tuple(one.shape)} in place of {tuple(shape)}"
            )
        if self.estimator.per_response:
            return advantages, returns
        return in_place(advantages, order), in_place(returns, order)

    def outcomes(self, rewards: Tensor, masks: Masks) -> Tensor:
        """The discounted sum of the rewards from each position to the end: (B, T) float32. The critic's values are not
        used. All ranks call this together."""
        order = marked_first(masks.state)
        rewards = self._learned_rewards(rewards, masks).gather(1, order)
        return in_place(returns_to_go(rewards, self.dialect.gamma), order)

    def _learned_rewards(self, rewards: Tensor, masks: Masks) -> Tensor:
        if not self.dialect.whiten_rewards:
            return rewards
        return self._whitened(rewards, self._whitened_together(masks, masks.value), center=False)

    def _deviations(self, rewards: Tensor, valid: Tensor) -> Tensor:
        """The standard deviations of rewards by which advantages are divided. With advantage_scale "group" they are
        (B,), for each response that of its group; otherwise a scalar, that of all ranks' responses. rewards: (B,)
        float32."""
        unbiased = self.dialect.scale_variance == "unbiased"
        if self.dialect.advantage_scale == "group":
            return group_deviations(rewards, self.dialect.samples_per_prompt, valid, unbiased=unbiased)
        _, variance = mean_and_variance(self.reduce(moments(rewards, valid)), unbiased)
        return variance.sqrt().to(rewards.dtype)

    def _whitened_together(self, masks: Masks, mask: Tensor) -> Tensor:
        """The positions over which whitening computes mean and variance, (B, T) bool: the positions in `mask`. With
        whiten_positions "row" they are the first n positions of every row, where n is the largest number of values kept
        in a row."""
        if self.dialect.whiten_positions == "response":
            return mask
        return first_positions(masks.state.sum(-1).amax().expand(len(mask)), mask.shape[1])

    def _whitened(self, tensor: Tensor, mask: Tensor, center: bool) -> Tensor:
        totals = moments(tensor, mask)
        if self.dialect.whiten_over == "all_ranks":
            totals = self.reduce(totals)
        statistics = mean_and_variance(totals, self.dialect.unbiased_variance(self.ranks))
        return whiten(tensor, mask, center=center, statistics=statistics)

    # The batch for the optimizer steps, and the KL coefficient of the next step.

    def training_batch(
        self,
        experience: Experience,
        positions: Positions,
        scores: Tensor,
        rewards: Tensor,
        values: Tensor,
        advantages: Tensor,
        returns: Tensor,
        kl_coef: float,
    ) -> TrainingBatch:
        """The batch for the optimizer steps. The arguments are the results of this class's other methods.

        With `mask_truncated` nothing is learned from responses without an end. This method masks such responses after
        the advantages were computed, so that the other responses of a group are still compared with them.

        Raises: RunStopped as `correction`.
        Source: huggingface/trl v1.16.0, trl/trainer/grpo_trainer.py, `mask_truncated_completions`, which also computes
        advantages from all responses; Yu et al. 2025, "DAPO", section 3.4, overlong filtering.
        """
        rollout = experience.rollout
        policy_mask = positions.masks.policy
        value_mask = positions.masks.value
        if self.dialect.mask_truncated:
            ended = rollout.ended.unsqueeze(-1)
            policy_mask, value_mask = policy_mask & ended, value_mask & ended
        correction, cut = self.correction(experience.logprobs, rollout)
        return TrainingBatch(
            rollout=rollout,
            logprobs=experience.logprobs,
            entropy=experience.entropy,
            ref_logprobs=experience.ref_logprobs,
            values=values,
            scores=experience.scores,
            processed_scores=scores,
            kl=experience.kl,
            measured_kl=self.measured_kl(experience, positions),
            kl_coef=kl_coef,
            rewards=rewards,
            advantages=advantages,
            returns=returns,
            policy_mask=policy_mask,
            value_mask=value_mask,
            state_mask=positions.masks.state,
            correction=correction,
            cut=cut,
            whole_scores=experience.whole_scores,
        )

    def correction(self, logprobs: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Returns the importance weights of the policy's loss, (B, T) float32, and which of them were cut, (B, T) bool.
        The weights correct for a sampler that differs slightly from the policy. Returns (None, None) in a dialect
        without correction.

        Args:
            logprobs: (B, T) float32, from the actor's forward pass.

        Raises: RunStopped if the rollout has no log-probs of the sampler.
        """
        dialect = self.dialect
        if dialect.correction == "none":
            return None, None
        if rollout.logprobs is None:
            raise RunStopped(
                f"correction {dialect.correction!r} compares the sampler's log-probs with the actor's, and this "
                "rollout backend notes none. Take another --rollout_backend, or --set correction=none."
            )
        rule, bounds = CORRECTIONS[dialect.correction], (dialect.correction_min, dialect.correction_max)
        return rule.weights(logprobs, rollout.logprobs, rollout.actions, *bounds)

    def measured_kl(self, experience: Experience, positions: Positions) -> Tensor:
        """The KL that the controller of the KL coefficient gets: (B,) float32, in nats. It is a sum over the response's
        drawn tokens and, with kl_measure "exp_delta", over the tokens of the prompt."""
        measure = self.dialect.kl_measure
        if measure == "k1":
            return experience.kl.sum(-1)
        of_response = measured_kl(experience.logprobs, experience.ref_logprobs, positions.kl_mask, measure)
        return experience.prompt_kl + of_response

    def kl_controller(self) -> FixedKL | AdaptiveKL:
        """A new controller of the KL coefficient."""
        dialect = self.dialect
        if dialect.kl_controller == "fixed":
            return FixedKL(dialect.kl_coef)
        return AdaptiveKL(dialect.kl_coef, dialect.kl_target, dialect.kl_horizon, dialect.kl_update)

    # Advantages that are estimated again during the optimizer steps.

    def for_mini_batch(self, batch: TrainingBatch) -> TrainingBatch:
        """The rows of a mini-batch, with new advantages and returns if the dialect estimates them in each mini-batch
        (all ranks call this together)."""
        return self._estimated_anew(batch) if self.dialect.advantages_at == "mini_batch" else batch

    def for_micro_batch(self, batch: TrainingBatch) -> TrainingBatch:
        """The rows of a micro-batch, with new advantages and returns if the dialect estimates them in each
        micro-batch."""
        return self._estimated_anew(batch) if self.dialect.advantages_at == "micro_batch" else batch

    def _estimated_anew(self, batch: TrainingBatch) -> TrainingBatch:
        advantages, returns = self.compute_advantages(batch.rewards, batch.values, batch.masks)
        return replace(batch, advantages=advantages, returns=returns)
