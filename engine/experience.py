"""The data of a step: prompts, rollouts, experience, training batch. The classes check their shapes and dtypes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def position_ids(attention_mask: Tensor) -> Tensor:
    """The position ids, (B, S) int64: 0 at the first real token of a row, 1 at the next. They are the exclusive
    cumulative sum of the attention mask."""
    return attention_mask.cumsum(-1) - attention_mask


def _check(name: str, tensor: Tensor, shape: tuple, dtype: torch.dtype) -> None:
    assert tuple(tensor.shape) == shape and tensor.dtype == dtype, (
        f"{name} is {tuple(tensor.shape)} {tensor.dtype}, should be {shape} {dtype}"
    )


def of_width(column: Tensor, width: int) -> Tensor:
    """Numbers of tokens, (N, t), as (N, width): zeros are added, or positions that are padding are left out."""
    return F.pad(column, (0, width - column.shape[1]))


def joined_pieces(pieces: Sequence[Tensor], rows: Sequence[Tensor], width: int) -> Tensor:
    """The tensors (N, t) or (N,) of a rollout's pieces joined into one (B, width) or (B,), in the rollout's order.
    rows: (N,) int64, the rollout's rows in each piece."""
    whole = [of_width(piece, width) if piece.dim() == 2 else piece for piece in pieces]
    return torch.cat(whole)[torch.cat(list(rows)).argsort()]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts to draw responses for, left-padded.

    input_ids (B, P) int64; attention_mask (B, P) int64; indices (B,) int64, each prompt's index in the data; samples
    (B,) int64, the number of the sample that each row draws for its prompt: 0 for the prompt's first sample; most (B,)
    int64, the largest number of tokens in each row's response, or None if they are all SamplingConfig.max_new_tokens;
    first_row: the index 0 means this row of the data. Random numbers are keyed by the indices alone.
    """

    input_ids: Tensor
    attention_mask: Tensor
    indices: Tensor
    samples: Tensor
    most: Tensor | None = None
    first_row: int = 0

    def __post_init__(self):
        shape = tuple(self.input_ids.shape)
        _check("input_ids", self.input_ids, shape, torch.int64)
        _check("attention_mask", self.attention_mask, shape, torch.int64)
        _check("indices", self.indices, shape[:1], torch.int64)
        _check("samples", self.samples, shape[:1], torch.int64)
        if self.most is not None:
            _check("most", self.most, shape[:1], torch.int64)

    def __len__(self) -> int:
        return len(self.input_ids)

    def to(self, device) -> "PromptBatch":
        return self._changed(lambda column: column.to(device))

    def select(self, rows: list[int]) -> "PromptBatch":
        """The given rows, in the given order."""
        return self._changed(lambda column: column[rows])

    def repeat(self, k: int) -> "PromptBatch":
        """Each row repeated k times, in adjacent rows. The copies of a row with sample number s get the numbers k * s
        to k * s + k - 1."""
        if k == 1:
            return self
        which = torch.arange(k, device=self.samples.device).repeat(len(self))
        repeated = self._changed(lambda column: column.repeat_interleave(k, 0))
        return replace(repeated, samples=repeated.samples * k + which)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "PromptBatch":
        """This batch with `change` applied to each tensor."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(one) for name, one in columns.items() if isinstance(one, Tensor)}
        return replace(self, **changed)


COLUMNS = ("logprobs", "entropy", "action_mask", "turn_rewards")  # the fields of Rollout that may be None, each (B, T)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Prompts with sampled responses: P prompt positions (left-padded), T response positions (right-padded), S = P + T.

    sequences (B, S) int64; attention_mask (B, S) int64, 1 on real prompt tokens and on tokens of the response;
    response_mask (B, T) bool, the first n positions of a row: the tokens of the response, EOS included; ended (B,)
    bool, whether the response reached an end token or stop string; indices, samples (B,) int64 as in PromptBatch;
    logprobs, entropy (B, T) float32, of the sampled tokens as the sampler computed them, or None if it records none.

    In a conversation, an environment inserts tokens into the response between the turns that the policy draws:
    action_mask (B, T) bool, the tokens of the response that the policy drew, or None if it drew all of them;
    turn_rewards (B, T) float32, the environment's rewards, each at the last drawn token of its turn, or None without
    an environment. logprobs and entropy are 0 at inserted tokens.
    """

    sequences: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    ended: Tensor
    indices: Tensor
    samples: Tensor
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    action_mask: Tensor | None = None
    turn_rewards: Tensor | None = None

    def __post_init__(self):
        rows, width = self.sequences.shape
        _check("sequences", self.sequences, (rows, width), torch.int64)
        _check("attention_mask", self.attention_mask, (rows, width), torch.int64)
        _check("response_mask", self.response_mask, (rows, self.response_length), torch.bool)
        assert 0 < self.response_length < width, f"{self.response_length} response positions in a width of {width}"
        for name in ("ended", "indices", "samples"):
            _check(name, getattr(self, name), (rows,), torch.bool if name == "ended" else torch.int64)
        for name in COLUMNS:
            if getattr(self, name) is not None:
                dtype = torch.bool if name == "action_mask" else torch.float32
                _check(name, getattr(self, name), (rows, self.response_length), dtype)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def response_length(self) -> int:
        """T, the number of response positions."""
        return self.response_mask.shape[1]

    @property
    def prompt_length(self) -> int:
        """P, the number of prompt positions."""
        return self.sequences.shape[1] - self.response_length

    @property
    def actions(self) -> Tensor:
        """(B, T) bool, the tokens of the response that the policy drew."""
        return self.response_mask if self.action_mask is None else self.action_mask & self.response_mask

    @property
    def position_ids(self) -> Tensor:
        """(B, S) int64."""
        return position_ids(self.attention_mask)

    @property
    def prompts(self) -> Tensor:
        """(B, P) int64."""
        return self.sequences[:, : self.prompt_length]

    @property
    def responses(self) -> Tensor:
        """(B, T) int64."""
        return self.sequences[:, self.prompt_length :]

    def cut(self, kept: Tensor, ended: Tensor, pad_token_id: int) -> "Rollout":
        """This rollout with every response token outside of `kept`, (B, T) bool, replaced by padding. ended: (B,) bool,
        becomes the field `ended` of the result."""
        prompt = self.prompt_length
        real = torch.cat([self.attention_mask[:, :prompt], self.attention_mask[:, prompt:] * kept], 1)
        responses = torch.where(kept, self.responses, pad_token_id)
        return replace(
            self,
            sequences=torch.cat([self.prompts, responses], 1),
            attention_mask=real,
            response_mask=kept,
            ended=ended,
        )

    def without_attention_to(self, token: int) -> "Rollout":
        """This rollout, in which attention and position ids leave out the given token, in prompts and responses."""
        return replace(self, attention_mask=self.attention_mask * (self.sequences != token))

    def from_second_token(self) -> "Rollout":
        """This rollout with all positions but the first counted as the response, so that a forward pass also returns
        log-probs of prompt tokens."""
        unknown: dict[str, Any] = dict.fromkeys(COLUMNS)
        return replace(self, response_mask=self.attention_mask[:, 1:].bool(), **unknown)

    def select(self, rows: Tensor | slice, positions_after: int | None = 0) -> "Rollout":
        """The given rows, without positions that are padding in all of them.

        positions_after: how many positions are kept after the end of the longest response; None keeps all.
        """
        picked = {
            field.name: getattr(self, field.name)[rows]
            for field in fields(self)
            if getattr(self, field.name) is not None
        }
        prompt = self.prompt_length
        mask = picked["attention_mask"]
        response_mask = picked["response_mask"]
        response, empty = self.response_length, mask[:, :prompt].any(0).cumsum(0) == 0
        left, longest = torch.stack([empty.sum(), response_mask.any(0).sum()]).tolist()  # one transfer to the host
        left = min(left, prompt - 1)
        if positions_after is not None:
            response = min(max(longest + positions_after, 1), response)
        cuts = {"sequences": slice(left, prompt + response), "attention_mask": slice(left, prompt + response)}
        cuts |= {name: slice(response) for name in ("response_mask", *COLUMNS)}
        return Rollout(**{name: tensor[:, cuts[name]] if name in cuts else tensor for name, tensor in picked.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """The results of a step's forward passes over a rollout. Position t belongs to response token t.

    rollout: the rollout that is learned from. Its `actions` are the tokens that are learned. Where the dialect ends a
        response, all later positions are padding.
    logprobs, entropy: (B, T) float32, of the policy that sampled the responses.
    ref_logprobs: (B, T) float32, of the reference.
    values: (B, T) float32, of the critic; None without a critic.
    scores: (B,) float32, from the reward source.
    prompt_kl: (B,) float32, the prompt tokens' part of the KL that steers the KL coefficient; zeros if the dialect
        measures the KL of responses only.
    score_parts: {name: (B,) float32}, the parts that add up to the scores; empty if a score has only one part. rewards:
    {name: (B,) float32}, the score from each reward source that has a weight, before it is multiplied by the weight;
    empty if no source has a weight.
    log_ratios: (N,) float32, log-probs of the actor's forward pass minus the sampler's, for all drawn tokens. If only
        the longest row had a forward pass, N is the number of this row's drawn tokens. None if the sampler records no
        log-probs.
    token_scores: (B, T) float32, the scores that belong to single tokens, 0 at other positions; whole_scores: (B,)
        float32, the rest of `scores`, which belongs to whole responses. None if no source scores tokens.
    """

    rollout: Rollout
    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor
    values: Tensor | None
    scores: Tensor
    prompt_kl: Tensor
    score_parts: dict[str, Tensor] = field(default_factory=dict)
    rewards: dict[str, Tensor] = field(default_factory=dict)
    log_ratios: Tensor | None = None
    token_scores: Tensor | None = None
    whole_scores: Tensor | None = None

    def __post_init__(self):
        shape = tuple(self.rollout.response_mask.shape)
        for name in ("logprobs", "entropy", "ref_logprobs", *(["values"] if self.values is not None else [])):
            _check(name, getattr(self, name), shape, torch.float32)
        for name in ("scores", "prompt_kl"):
            _check(name, getattr(self, name), shape[:1], torch.float32)
        if self.token_scores is not None and self.whole_scores is not None:
            _check("token_scores", self.token_scores, shape, torch.float32)
            _check("whole_scores", self.whole_scores, shape[:1], torch.float32)

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def kl(self) -> Tensor:
        """The log-prob minus the reference log-prob of each drawn token: (B, T) float32, 0 at other positions."""
        return torch.where(self.rollout.actions, self.logprobs - self.ref_logprobs, torch.zeros_like(self.logprobs))


@dataclass(frozen=True, slots=True)
class Masks:
    """Three masks, each (B, T) bool.

    policy: the positions that the policy's loss is summed over.
    value: the positions that the critic's loss is summed over.
    state: the positions at which the critic's values are kept; elsewhere values are 0. In GAE and in sums of rewards to
        come, time passes from one of these positions to the next.
    """

    policy: Tensor
    value: Tensor
    state: Tensor


@dataclass(frozen=True, slots=True)
class Positions:
    """Which positions of responses count for the score, the KL penalty, losses and values.

    lengths: (B,) int64, how many tokens of each response count.
    score: (B,) int64, the position in each response that gets the score.
    kl_mask: (B, T) bool, the positions of the KL penalty.
    masks: the masks of losses and values.
    """

    lengths: Tensor
    score: Tensor
    kl_mask: Tensor
    masks: Masks


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The data that the optimizer steps need, for some rows of an experience. Position t belongs to response token t.

    rollout, logprobs, entropy, ref_logprobs, scores, whole_scores: as in Experience. The losses use `logprobs` as the
        old policy's log-probs.
    values: (B, T) float32, the critic's values before the update, from `Algorithm.kept_values`; zeros without a critic.
    kl: (B, T) float32, as in Experience.
    measured_kl: (B,) float32, in nats, the KL that steers the KL coefficient.
    kl_coef: the coefficient of the KL penalty in this step.
    processed_scores: (B,) float32, the scores that enter the rewards, those of tokens included.
    rewards: (B, T) float32, before whitening.
    advantages, returns: (B, T) float32. Some dialects estimate advantages and returns again in each mini-batch or
        micro-batch.
    policy_mask, value_mask, state_mask: (B, T) bool, as in Masks.
    correction, cut: (B, T) float32 and (B, T) bool, from `Algorithm.correction`; None without correction.
    """

    rollout: Rollout
    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor
    values: Tensor
    scores: Tensor
    processed_scores: Tensor
    kl: Tensor
    measured_kl: Tensor
    kl_coef: float
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    policy_mask: Tensor
    value_mask: Tensor
    state_mask: Tensor
    correction: Tensor | None = None
    cut: Tensor | None = None
    whole_scores: Tensor | None = None

    @property
    def masks(self) -> Masks:
        """The masks as one object."""
        return Masks(self.policy_mask, self.value_mask, self.state_mask)

    def __post_init__(self):
        shape = tuple(self.rollout.response_mask.shape)
        for name in ("logprobs", "entropy", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns"):
            _check(name, getattr(self, name), shape, torch.float32)
        for name in ("policy_mask", "value_mask", "state_mask"):
            _check(name, getattr(self, name), shape, torch.bool)
        for name in ("scores", "processed_scores", "measured_kl"):
            _check(name, getattr(self, name), shape[:1], torch.float32)
        for name, dtype in (("correction", torch.float32), ("cut", torch.bool)):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), shape, dtype)

    def __len__(self) -> int:
        return len(self.rollout)

    def select(self, rows: Tensor | slice, positions_after: int | None = 0) -> "TrainingBatch":
        """The given rows, without positions that are padding in all of them. Arguments: as in `Rollout.select`."""
        rollout = self.rollout.select(rows, positions_after)
        picked = {
            field.name: getattr(self, field.name)[rows]
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(
            self,
            rollout=rollout,
            **{
                name: value if value.dim() == 1 else value[:, : rollout.response_length]
                for name, value in picked.items()
            },
        )
