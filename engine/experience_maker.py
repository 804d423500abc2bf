"""From rollouts to experience: log-probs, values and scores, then rewards, then advantages."""
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import distributed
from engine.algo.advantages import gae
from engine.algo.kl import kl_estimate
from engine.algo.masked import mean_and_variance, moments, whiten
from engine.algo.rewards import compute_rewards, counted_lengths, first_slots, score_slots
from engine.dialects import Dialect
from engine.ds_engine import TrainedModel
from engine.experience import Experience, Rollout
from engine.packing import micro_batches
from engine.reference import Reference
from engine.reward.base import RewardSource
from engine.reward.combined import CombinedReward, total

COMPARED_ROWS = 1  # responses of each rank whose log-probs by the sampler are compared with a forward pass's


@dataclass(frozen=True, slots=True)
class Judged:
    """What the four models say of a rollout: (B, T) float32 each, scores (B,).

    score_parts: name -> (B,), what adds up to the scores where that is more than one thing, else empty.
    logprob_gaps: (N,) float32, absolute differences between the sampler's log-probs and those of a forward pass, of the
        tokens of the longest row; None where all log-probs are a forward pass's.
    """
    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor
    values: Tensor
    scores: Tensor
    score_parts: dict[str, Tensor]
    logprob_gaps: Tensor | None = None


class ExperienceMaker:
    """Runs the four models over rollouts and turns what they say into what PPO learns from."""

    def __init__(self, *, actor: TrainedModel, critic: TrainedModel, reference: Reference, reward: RewardSource,
                 dialect: Dialect, pad_token_id: int, micro_batch_size: int):
        self.actor, self.critic = actor, critic
        self.reference, self.reward = reference, reward
        self.dialect, self.pad_token_id, self.micro_batch_size = dialect, pad_token_id, micro_batch_size

    def make(self, rollout: Rollout, kl_coef: float, tally: Callable[[str, Tensor], None] | None = None) -> Experience:
        """The experience of a rollout; advantages are whitened over all of it and all ranks.

        All ranks call this together, each with equally many rows.
        tally: told the names and numbers of metrics that only exist where there is something to them: the score's
            parts, and the gap between the sampler's log-probs and a forward pass's.
        """
        judged = self.judge(rollout)
        told = {f"objective/{name}": part for name, part in judged.score_parts.items()}
        if judged.logprob_gaps is not None:
            told["rollout/logprob_gap"] = judged.logprob_gaps
        for name, part in told.items() if tally else ():
            tally(name, part)
        experience = self.learnable(rollout, judged, kl_coef)
        if not self.dialect.whiten_advantages:
            return experience
        totals = distributed.all_reduce_sum(moments(experience.advantages, experience.policy_mask))
        white = whiten(experience.advantages, experience.policy_mask, statistics=mean_and_variance(totals))
        return replace(experience, advantages=white)

    @torch.no_grad()
    def judge(self, rollout: Rollout) -> Judged:
        """Forward passes of all four models, one model after the other, in micro-batches of rows of similar length."""
        beyond = int(self.dialect.reward_slots == "one_past")  # the slot after a response counts there too
        rows = micro_batches(rollout, self.micro_batch_size * rollout.sequences.shape[1], equally_many=True)
        pieces = [rollout.select(part, beyond) for part in rows]
        temperature = self.dialect.logprob_temperature

        def whole(columns: list[Tensor]) -> Tensor:
            """(N, t) or (N,) of each piece, back in the rollout's order and width."""
            wide = [F.pad(column, (0, rollout.response_length - column.shape[1])) if column.dim() == 2 else column
                    for column in columns]
            return torch.cat(wide)[torch.cat(rows).argsort()]

        def policy(piece: Rollout) -> tuple[Tensor, Tensor]:
            return self.actor(piece.sequences, piece.attention_mask, piece.position_ids, temperature=temperature,
                              response_length=piece.response_length, with_entropy=True)

        if self.dialect.old_logprobs != "forward" and rollout.logprobs is not None:
            logprobs, entropy, compared = rollout.logprobs, rollout.entropy, pieces[-1].select(slice(-COMPARED_ROWS, None))
            gaps = (policy(compared)[0] - compared.logprobs).abs()[compared.response_mask]
        else:
            logprobs, entropy = (whole(columns) for columns in zip(*map(policy, pieces)))
            gaps = None
        with self.reference.resident():
            ref_logprobs = whole([self.reference.ref_logprobs(piece, temperature) for piece in pieces])
        values = whole([self.critic(piece.sequences, piece.attention_mask,
                                    piece.position_ids)[:, piece.prompt_length - 1:-1] for piece in pieces])
        with self.reward.resident():
            scores, score_parts = self._scores(pieces, whole)
        return Judged(logprobs, entropy, ref_logprobs, values, scores, score_parts, gaps)

    def _scores(self, pieces: list[Rollout], whole: Callable[[list[Tensor]], Tensor]
                ) -> tuple[Tensor, dict[str, Tensor]]:
        if not isinstance(self.reward, CombinedReward):
            return whole([self.reward.score(piece).float() for piece in pieces]), {}
        by_piece = [self.reward.parts(piece) for piece in pieces]
        parts = {name: whole([part[name] for part in by_piece]) for name in by_piece[0]}
        return total(parts), parts if len(parts) > 1 else {}

    def clipped(self, scores: Tensor) -> Tensor:
        """The scores (B,) as they enter the rewards."""
        limit = self.dialect.score_clip
        return scores if limit is None else scores.clamp(-limit, limit)

    def learnable(self, rollout: Rollout, judged: Judged, kl_coef: float) -> Experience:
        """Rewards, advantages and masks as the dialect has them; advantages not yet whitened."""
        dialect, width = self.dialect, rollout.response_length
        lengths = counted_lengths(rollout.responses, rollout.response_mask, self.pad_token_id, dialect.length_rule)
        response = first_slots(lengths, width)
        state = response if dialect.reward_slots == "response" else first_slots(lengths + 1, width)
        learned = response & (lengths >= dialect.min_response_tokens).unsqueeze(-1)
        scores = self.clipped(judged.scores)
        penalty = kl_estimate(judged.logprobs, judged.ref_logprobs, dialect.kl_estimator)
        rewards = compute_rewards(penalty, kl_coef, state, scores, score_slots(lengths, width, dialect.score_slot))
        values = torch.where(state, judged.values, torch.zeros_like(judged.values))
        advantages, returns = gae(rewards, values, dialect.gamma, dialect.lam)
        kl = torch.where(rollout.response_mask, judged.logprobs - judged.ref_logprobs, torch.zeros_like(penalty))
        return Experience(
            rollout=rollout, logprobs=judged.logprobs, entropy=judged.entropy, ref_logprobs=judged.ref_logprobs,
            values=values, scores=judged.scores, kl=kl, rewards=rewards, advantages=advantages, returns=returns,
            policy_mask=learned, value_mask=learned)
