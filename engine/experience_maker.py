"""From rollouts to experience: log-probs, values and scores of all models, then what the dialect makes of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import distributed
from engine.algo.kl import measured_kl
from engine.algo.scores import ScoreScale
from engine.algorithms import Dialect
from engine.experience import Experience, Rollout
from engine.learnable import Masks, count_slots, estimate_advantages, process_scores, scored_text, token_rewards
from engine.packing import micro_batches
from engine.reference import Reference
from engine.reward.base import RewardSource
from engine.reward.combined import CombinedReward, total
from engine.zero.engines import TrainedModel

COMPARED_ROWS = 1  # responses of each rank whose log-probs by the sampler are compared with a forward pass's


@dataclass(frozen=True, slots=True)
class Judged:
    """What the models say of a rollout: (B, T) float32 each, scores (B,).

    rollout: what is learned; with `scored_mask` (B, T) bool, what of it was scored.
    values: None without a critic.
    prompt_kl: (B,) float32, the part of the KL that steers the coefficient which is the prompts'; zeros where only
        responses are measured.
    score_parts: name -> (B,), what adds up to the scores where that is more than one thing, else empty.
    logprob_gaps: (N,) float32, absolute differences between the sampler's log-probs and those of a forward pass, of the
        tokens of the longest row; None where all log-probs are a forward pass's.
    """

    rollout: Rollout
    scored_mask: Tensor
    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor
    prompt_kl: Tensor
    values: Tensor | None
    scores: Tensor
    score_parts: dict[str, Tensor]
    logprob_gaps: Tensor | None = None


class ExperienceMaker:
    """Runs the models over rollouts and turns what they say into what PPO learns from.

    critic: None where the dialect has none. end_token_id: the token that scored texts end with where responses do not
    stop at it (`engine.algorithms.end_token_id`). `score_scale` is what scores are divided by, and changes during a
    run.
    """

    def __init__(
        self,
        *,
        actor: TrainedModel,
        critic: TrainedModel | None,
        reference: Reference,
        reward: RewardSource,
        dialect: Dialect,
        pad_token_id: int,
        micro_batch_size: int,
        end_token_id: int | None = None,
    ):
        assert (critic is not None) == dialect.has_critic, (
            f"dialect {dialect.name}, critic_start {dialect.critic_start}"
        )
        self.actor, self.critic = actor, critic
        self.reference, self.reward = reference, reward
        self.dialect, self.pad_token_id, self.micro_batch_size = dialect, pad_token_id, micro_batch_size
        self.end_token_id = end_token_id
        self.score_scale = ScoreScale(dialect.score_scaling)

    def make(self, rollout: Rollout, kl_coef: float, tally: Callable[[str, Tensor], None] | None = None) -> Experience:
        """The experience of a rollout, advantages over all of it.

        All ranks call this together, each with equally many rows. Where a dialect counts slots past a response, the
        rows should be as wide as the system's own: they end with the longest response of what was generated together,
        which is all that this rank generated in the step, or after a fixed length.

        tally: told the names and numbers of metrics that only exist where there is something to them: the score's
            parts, and the gap between the sampler's log-probs and a forward pass's.
        """
        judged = self.judge(rollout)
        told = {f"objective/{name}": part for name, part in judged.score_parts.items()}
        if judged.logprob_gaps is not None:
            told["rollout/logprob_gap"] = judged.logprob_gaps
        for name, part in told.items() if tally else ():
            tally(name, part)
        return self.learnable(judged, kl_coef)

    @torch.no_grad()
    def judge(self, rollout: Rollout) -> Judged:
        """Forward passes of all models, one model after the other, in micro-batches of rows of similar length."""
        learned, scored = self._texts(rollout)
        rows = micro_batches(learned, self.micro_batch_size * learned.sequences.shape[1], equally_many=True)
        pieces = [learned.select(part, self.dialect.slots_past_response) for part in rows]

        def whole(columns: list[Tensor]) -> Tensor:
            """(N, t) or (N,) of each piece, back in the rollout's order and width."""
            wide = [
                F.pad(column, (0, rollout.response_length - column.shape[1])) if column.dim() == 2 else column
                for column in columns
            ]
            return torch.cat(wide)[torch.cat(rows).argsort()]

        logprobs, entropy, ref_logprobs, prompt_kl, gaps = self._policies(learned, pieces, whole)
        values = (
            None
            if self.critic is None
            else whole(
                [
                    self.critic(piece.sequences, piece.attention_mask, piece.position_ids)[
                        :, piece.prompt_length - 1 : -1
                    ]
                    for piece in pieces
                ]
            )
        )
        with self.reward.on_device():
            scores, score_parts = self._scores([scored.select(part) for part in rows], whole)
        return Judged(
            learned, scored.response_mask, logprobs, entropy, ref_logprobs, prompt_kl, values, scores, score_parts, gaps
        )

    def _texts(self, rollout: Rollout) -> tuple[Rollout, Rollout]:
        """What is learned and what is scored: the same, but where a dialect learns all that was sampled."""
        kept, ended = scored_text(
            rollout.responses, rollout.response_mask, rollout.ended, self.dialect, self.end_token_id
        )
        scored = rollout.cut(kept, ended, self.pad_token_id)
        return (replace(rollout, ended=ended) if self.dialect.length_rule == "row" else scored), scored

    def _policies(
        self, learned: Rollout, pieces: list[Rollout], whole: Callable[[list[Tensor]], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Log-probs and entropy, reference log-probs, prompt_kl and logprob_gaps, as in Judged."""
        temperature = self.dialect.logprob_temperature
        asked = [piece.from_second_token() for piece in pieces] if self.dialect.measures_prompts else pieces

        def policy(piece: Rollout) -> tuple[Tensor, Tensor]:
            return self.actor(
                piece.sequences,
                piece.attention_mask,
                piece.position_ids,
                temperature=temperature,
                response_length=piece.response_length,
                with_entropy=True,
            )

        def responses(columns: list[Tensor]) -> Tensor:
            return whole([column[:, -piece.response_length :] for column, piece in zip(columns, pieces)])

        gaps, noted = None, learned.logprobs is not None
        assert noted or self.dialect.old_logprobs != "sampler", "the rollout has no log-probs of the sampler"
        if self.dialect.takes_sampled_logprobs and noted:
            logprobs, entropy = learned.logprobs, learned.entropy
            compared = pieces[-1].select(slice(-COMPARED_ROWS, None))
            gaps = (policy(compared)[0] - compared.logprobs).abs()[compared.response_mask]
        else:
            by_piece, entropies = zip(*map(policy, asked))
            logprobs, entropy = responses(by_piece), responses(entropies)
        with self.reference.on_device():
            references = [self.reference.ref_logprobs(piece, temperature) for piece in asked]
        prompt_kl = torch.zeros(len(learned), device=logprobs.device)
        if self.dialect.measures_prompts:
            prompt_kl = whole(
                [_kl_of_prompt(*columns, self.dialect.kl_measure) for columns in zip(pieces, by_piece, references)]
            )
        return logprobs, entropy, responses(references), prompt_kl, gaps

    def _scores(
        self, pieces: list[Rollout], whole: Callable[[list[Tensor]], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not isinstance(self.reward, CombinedReward):
            return whole([self.reward.score(piece).float() for piece in pieces]), {}
        by_piece = [self.reward.parts(piece) for piece in pieces]
        parts = {name: whole([part[name] for part in by_piece]) for name in by_piece[0]}
        return total(parts), parts if len(parts) > 1 else {}

    def learnable(self, judged: Judged, kl_coef: float) -> Experience:
        """Rewards, masks and advantages as the dialect has them; the score's scale takes note of the scores."""
        rollout, dialect = judged.rollout, self.dialect
        slots = count_slots(rollout.responses, judged.scored_mask, self.pad_token_id, dialect)
        shaped = process_scores(judged.scores, rollout.ended, dialect, self.score_scale, distributed.all_reduce_sum)
        rewards, values = token_rewards(
            judged.logprobs, judged.ref_logprobs, judged.values, shaped, slots, kl_coef, dialect
        )
        kl = torch.where(rollout.response_mask, judged.logprobs - judged.ref_logprobs, torch.zeros_like(rewards))
        measured = (
            kl.sum(-1)
            if dialect.kl_measure == "k1"
            else judged.prompt_kl + measured_kl(judged.logprobs, judged.ref_logprobs, slots.kl, dialect.kl_measure)
        )
        zeros, masks = torch.zeros_like(rewards), slots.masks
        return estimated(
            Experience(
                rollout=rollout,
                logprobs=judged.logprobs,
                entropy=judged.entropy,
                ref_logprobs=judged.ref_logprobs,
                values=values,
                scores=judged.scores,
                shaped_scores=shaped,
                kl=kl,
                measured_kl=measured,
                kl_coef=kl_coef,
                rewards=rewards,
                advantages=zeros,
                returns=zeros,
                policy_mask=masks.policy,
                value_mask=masks.value,
                state_mask=masks.state,
            ),
            dialect,
        )


def estimated(experience: Experience, dialect: Dialect) -> Experience:
    """These rows with advantages and returns from their rewards and values, whitened as the dialect has it.

    All ranks call this together, each with its own rows.
    """
    masks = Masks(experience.policy_mask, experience.value_mask, experience.state_mask)
    advantages, returns = estimate_advantages(
        experience.rewards, experience.values, masks, dialect, distributed.all_reduce_sum, distributed.world_size()
    )
    return replace(experience, advantages=advantages, returns=returns)


def _kl_of_prompt(piece: Rollout, logprobs: Tensor, ref_logprobs: Tensor, measure: str) -> Tensor:
    """(B,) float32; log-probs (B, S - 1) of all tokens but the first. What precedes a token must be real, too."""
    prompt = piece.prompt_length - 1
    return measured_kl(logprobs[:, :prompt], ref_logprobs[:, :prompt], piece.attention_mask[:, :prompt].bool(), measure)
