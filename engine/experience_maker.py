"""Makes an experience from a rollout, by forward passes of all models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.algo.kl import measured_kl
from engine.algorithms import Algorithm
from engine.experience import Experience, Rollout, joined_pieces, of_width
from engine.packing import micro_batches
from engine.reference import Reference
from engine.reward.base import RewardSource, of_responses
from engine.zero.engines import TrainedModel

# If the sampler's log-probs are used, the actor still computes this number of responses on each rank, for comparison.
COMPARED_ROWS = 1

# A function that joins the tensors (N, t) or (N,) of all micro-batches into one tensor (B, T) or (B,), whose rows and
# width are the rollout's.
Join = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Scores:
    """A reward source's results for B responses; each tensor but `tokens` is (B,) float32.

    parts: {name: part}, the parts that add up to the scores; empty if a score has only one part.
    rewards: {name of a source that has a weight: its score before it is multiplied by the weight}; empty if no source
        has a weight.
    tokens, whole: the scores of single tokens, (B, T), and the rest of the scores. None if no source scores tokens.
    """

    scores: Tensor
    parts: dict[str, Tensor]
    rewards: dict[str, Tensor]
    tokens: Tensor | None = None
    whole: Tensor | None = None

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Scores":
        """These Scores with `change` applied to each tensor."""
        parts, rewards = (
            {name: change(column) for name, column in columns.items()} for columns in (self.parts, self.rewards)
        )
        if self.tokens is None or self.whole is None:
            return Scores(change(self.scores), parts, rewards)
        return Scores(change(self.scores), parts, rewards, change(self.tokens), change(self.whole))

    @classmethod
    def joined(cls, pieces: "Sequence[Scores]") -> "Scores":
        """The scores of several pieces of a rollout, concatenated in the given order."""
        first = pieces[0]
        return cls(
            torch.cat([piece.scores for piece in pieces]),
            {name: torch.cat([piece.parts[name] for piece in pieces]) for name in first.parts},
            {name: torch.cat([piece.rewards[name] for piece in pieces]) for name in first.rewards},
            _side_by_side([piece.tokens for piece in pieces if piece.tokens is not None]),
            None if first.whole is None else torch.cat([piece.whole for piece in pieces if piece.whole is not None]),
        )


class ExperienceMaker:
    """Computes an experience from a rollout. One model after the other does its forward passes, in micro-batches of
    rows of similar length.

    critic: None if the algorithm has none. micro_batch_size: the number of rows of full length in one forward pass.
    exact_sampler: whether the sampler's log-probs equal those of a forward pass within rounding. With `old_logprobs`
    "auto" they are used as old log-probs only if this is true.
    padded: whether the models also compute padding, so that padding counts among the tokens of a forward pass.
    """

    def __init__(
        self,
        *,
        actor: TrainedModel,
        critic: TrainedModel | None,
        reference: Reference,
        reward: RewardSource,
        algorithm: Algorithm,
        micro_batch_size: int,
        exact_sampler: bool = True,
        padded: bool = True,
    ):
        self.actor = actor
        self.critic = critic
        self.reference = reference
        self.reward = reward
        self.algorithm, self.micro_batch_size = algorithm, micro_batch_size
        self.padded = padded
        self.temperature = algorithm.dialect.logprob_temperature
        self.takes_sampled_logprobs = algorithm.dialect.takes_sampled_logprobs(exact_sampler)

    @torch.no_grad()
    def make_experience(self, rollout: Rollout, scores: Scores | None = None, policies: bool = True) -> Experience:
        """Log-probs, values and scores of a rollout (all ranks call this together, each with equally many rows).

        In a dialect that counts positions after a response, the rows must be as wide as those of the system that the
        dialect follows: as the longest response that this rank generated in the step, or as a fixed length.

        scores: the scores of these rows, if `score` has already computed them. policies: whether actor and reference
        compute. If they do not, log-probs and entropies are zeros. This is for steps in which actor and reference are
        equal, so that the KL between them is 0.
        """
        learned, scored = self.algorithm.texts(rollout)
        if scores is None:
            self.reward.prepare(scored)
        rows = self._micro_batches(learned)
        pieces = [learned.select(part, self.algorithm.dialect.positions_past_response) for part in rows]
        joined = partial(joined_pieces, rows=rows, width=rollout.response_length)
        by_policies = self._by_policies(learned, pieces, joined) if policies else _unasked(learned)
        values = self._values(pieces, joined)
        scores = scores or self._scores(scored, rows)
        return Experience(
            rollout=learned,
            values=values,
            scores=scores.scores,
            score_parts=scores.parts,
            rewards=scores.rewards,
            token_scores=None if scores.tokens is None else of_width(scores.tokens, rollout.response_length),
            whole_scores=scores.whole,
            **by_policies,
        )

    @torch.no_grad()
    def score(self, rollout: Rollout) -> Scores:
        """The scores of a rollout, without log-probs and values, for a caller that leaves out responses by their scores
        (all ranks call this together, each with equally many rows)."""
        learned, scored = self.algorithm.texts(rollout)
        self.reward.prepare(scored)
        return self._scores(scored, self._micro_batches(learned))

    def _micro_batches(self, learned: Rollout) -> list[Tensor]:
        """The rows of each forward pass. All ranks have equally many passes."""
        tokens = self.micro_batch_size * learned.sequences.shape[1]
        return micro_batches(learned, tokens, equally_many=True, padded=self.padded)

    def _by_policies(self, learned: Rollout, pieces: list[Rollout], joined: Join) -> dict[str, Any]:
        """Returns what actor and reference compute, as {field of Experience: tensor}."""
        dialect = self.algorithm.dialect
        assert learned.logprobs is not None or dialect.old_logprobs != "sampler", (
            "the rollout has no log-probs of the sampler"
        )
        asked = [piece.from_second_token() for piece in pieces] if dialect.measures_prompts else pieces

        def of_responses(columns: Sequence[Tensor]) -> Tensor:
            pairs = zip(columns, pieces, strict=True)
            return joined([column[:, -piece.response_length :] for column, piece in pairs])

        if self.takes_sampled_logprobs and learned.logprobs is not None:
            logprobs, entropy = learned.logprobs, learned.entropy
            compared = pieces[-1].select(slice(-COMPARED_ROWS, None))
            log_ratios = _log_ratios(self._policy(compared)[0], compared)
        else:
            with self.actor.inferring():
                by_piece, entropies = zip(*map(self._policy, asked), strict=True)
            logprobs, entropy = of_responses(by_piece), of_responses(entropies)
            log_ratios = _log_ratios(logprobs, learned)
        with self.reference.on_device(), self.reference.inferring():
            references = [self.reference.ref_logprobs(piece, self.temperature) for piece in asked]
        prompt_kl = torch.zeros(len(learned), device=logprobs.device)
        if dialect.measures_prompts:
            prompt_kl = joined([self._prompt_kl(*part) for part in zip(pieces, by_piece, references, strict=True)])
        return {
            "logprobs": logprobs,
            "entropy": entropy,
            "ref_logprobs": of_responses(references),
            "prompt_kl": prompt_kl,
            "log_ratios": log_ratios,
        }

    def _policy(self, piece: Rollout) -> tuple[Tensor, Tensor]:
        return self.actor(
            piece.sequences,
            piece.attention_mask,
            piece.position_ids,
            temperature=self.temperature,
            response_length=piece.response_length,
            with_entropy=True,
        )

    def _prompt_kl(self, piece: Rollout, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """The prompt tokens' part of the KL that the controller of the KL coefficient gets: (N,) float32. logprobs,
        ref_logprobs: (N, S - 1), of all tokens but the first. A token counts only if the token before it is not
        padding."""
        prompt = piece.prompt_length - 1
        real = piece.attention_mask[:, :prompt].bool()
        return measured_kl(logprobs[:, :prompt], ref_logprobs[:, :prompt], real, self.algorithm.dialect.kl_measure)

    def _values(self, pieces: list[Rollout], joined: Join) -> Tensor | None:
        """The value of the state before each response token, (B, T) float32; None without a critic."""
        critic = self.critic
        if critic is None:
            return None
        with critic.inferring():
            by_token = [critic(piece.sequences, piece.attention_mask, piece.position_ids) for piece in pieces]
        return joined([values[:, piece.prompt_length - 1 : -1] for values, piece in zip(by_token, pieces, strict=True)])

    def _scores(self, scored: Rollout, rows: list[Tensor]) -> Scores:
        measured = self.reward.measured(scored, rows)
        weights = self.reward.weights()
        said = {name: of_responses(part) for name, part in measured.items()}
        parts = {name: weights.get(name, 1.0) * part for name, part in said.items()}
        scores = Scores(
            scores=torch.stack(list(parts.values())).sum(0),
            parts=parts if len(parts) > 1 else {},
            rewards={name.removeprefix("scores_"): said[name] for name in weights},
        )
        tokens = [weights.get(name, 1.0) * part for name, part in measured.items() if part.dim() == 2]
        if not tokens:
            return scores
        whole = [parts[name] for name, part in measured.items() if part.dim() == 1]
        zeros = torch.zeros_like(scores.scores)
        return replace(scores, tokens=torch.stack(tokens).sum(0), whole=torch.stack([zeros, *whole]).sum(0))


def _side_by_side(columns: list[Tensor]) -> Tensor | None:
    """Numbers of tokens, (N, t) each, joined into one (B, T) with the largest width; None of none."""
    width = max((column.shape[1] for column in columns), default=0)
    return torch.cat([of_width(column, width) for column in columns]) if columns else None


def _unasked(learned: Rollout) -> dict[str, Any]:
    """Zeros in place of the results of actor and reference, for a step in which neither computes."""
    zeros = torch.zeros(learned.response_mask.shape, device=learned.sequences.device)
    return {**dict.fromkeys(("logprobs", "entropy", "ref_logprobs"), zeros), "prompt_kl": zeros[:, 0]}


def _log_ratios(logprobs: Tensor, rollout: Rollout) -> Tensor | None:
    """The actor's log-probs, (B, T), minus the sampler's, for the N drawn tokens: (N,) float32. None if the sampler
    recorded no log-probs."""
    return None if rollout.logprobs is None else (logprobs - rollout.logprobs)[rollout.actions]
