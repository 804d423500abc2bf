"""What all decoding needs: requests for responses; where responses end; the schedule of which requests are in the
batch; drawing tokens with each response's own random numbers; joining the prompts and rollouts of several calls or
ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.algo.logprobs import token_logprobs
from engine.algo.sampling import keyed_uniforms, sample_tokens
from engine.distributed import RankGroup
from engine.experience import PromptBatch, Rollout
from engine.rollout.base import SamplingConfig


class Ends:
    """What ends a response: an end token, or the token that completes one of the stop strings."""

    def __init__(self, tokenizer, tokens: Sequence[int] = (), strings: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.tokens = frozenset(tokens)
        self.strings = tuple(strings)

    def first(self, response: list[int], start: int = 0) -> int | None:
        """The number of tokens of a response up to and including its first end; None if it has no end.

        start: the position from which tokens are checked for end tokens; earlier tokens have been checked before.
        """
        end = next((place + 1 for place in range(start, len(response)) if response[place] in self.tokens), None)
        before = response[:end]
        if not self.strings or not self._holds_string(before):
            return end
        low, high = 1, len(before)  # bisection works because a complete string stays in the text
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds_string(before[:middle]) else (middle + 1, high)
        return low

    def _holds_string(self, tokens: list[int]) -> bool:
        text = self.tokenizer.decode(tokens)
        return any(string in text for string in self.strings)


@dataclass(slots=True)
class Request:
    """A prompt that needs a response, and the response so far.

    row: the prompt's row in the batch of prompts and in the rollout.
    prompt_length: the number of real tokens of the prompt.
    most: the largest number of tokens in the response.
    tokens: the response's tokens that the host has seen.
    drawn: the number of drawn tokens, including tokens that the host has not seen and tokens after the end.
    ended: whether the response reached an end token or string.
    """

    row: int
    prompt_length: int
    most: int
    tokens: list[int] = field(default_factory=list)
    drawn: int = 0
    ended: bool = False

    @property
    def read(self) -> int:
        """The number of tokens of prompt and response that the model has read: all but the latest drawn token."""
        return self.prompt_length + self.drawn - 1

    @property
    def finished(self) -> bool:
        """Whether the response needs no further token, as far as the host has seen."""
        return self.ended or len(self.tokens) >= self.most

    def look(self, drawn: Sequence[int], ends: Ends) -> None:
        """Append the tokens that were drawn since the last call, up to the first end."""
        looked_at = len(self.tokens)
        self.tokens += drawn[: self.most - looked_at]
        end = ends.first(self.tokens, looked_at)
        if end is not None:
            self.ended = True
            del self.tokens[end:]


def make_requests(prompts: PromptBatch, most: int) -> list[Request]:
    """A request for each row of the prompts, in their order. most: the largest number of tokens in a response, if the
    prompts have no number for each row."""
    lengths = prompts.attention_mask.sum(-1).tolist()
    limits = [most] * len(lengths) if prompts.most is None else prompts.most.tolist()
    return [Request(row, length, limit) for row, (length, limit) in enumerate(zip(lengths, limits, strict=True))]


class Schedule:
    """Decides which requests are decoded. `living` lists those being decoded at present; request i of this list is in
    row i of the batch. When a request is finished, a waiting request takes its row. Of the waiting requests, the one
    with the longest prompt comes first.

    requests: all requests of a call. rows: the number of requests decoded at the same time.
    """

    def __init__(self, requests: Sequence[Request], rows: int):
        self.rows = min(rows, len(requests))
        self.living: list[Request] = []
        self._waiting = sorted(requests, key=lambda request: request.prompt_length)  # taken from the end

    @property
    def open(self) -> int:
        """The number of requests that are not finished."""
        return len(self._waiting) + len(self.living)

    def join(self) -> list[Request]:
        """Move waiting requests to the end of `living` and return them. No request is moved while less than an eighth
        of the rows is free, because all other rows have to wait while prompts are read."""
        room = self.rows - len(self.living)
        if room < self.rows // 8:
            return []
        joining = [self._waiting.pop() for _ in range(min(room, len(self._waiting)))]
        self.living += joining
        return joining

    def leave(self) -> tuple[list[int], list[int]]:
        """Remove finished requests from `living`. The last of the unfinished requests take the rows that become free.

        Returns: the rows to move, and the rows to move them to. After the moves, rows 0 to len(living) - 1 are in use.
        """
        sources, targets, kept = rows_to_move([not request.finished for request in self.living])
        for source, target in zip(sources, targets, strict=True):
            self.living[target] = self.living[source]
        del self.living[kept:]
        return sources, targets


def rows_to_move(stays: Sequence[bool]) -> tuple[list[int], list[int], int]:
    """Decides which rows to move so that the n rows that stay become rows 0 to n - 1. The last of the staying rows move
    into the free rows.

    stays: whether each row stays. Returns: the rows to move, the rows to move them to, and n.
    """
    kept = sum(stays)
    targets = [row for row in range(kept) if not stays[row]]
    sources = [row for row in range(kept, len(stays)) if stays[row]]
    return sources, targets, kept


class Draws:
    """Draws the tokens of a call's responses, and records the log-probs and entropies that `sampling` asks for.

    recorded: {name of a field of Rollout: (len(prompts), places) float32}; empty if `sampling` asks for no log-probs.
    places: the largest number of tokens drawn for a response, tokens after its end included.
    """

    def __init__(self, prompts: PromptBatch, sampling: SamplingConfig, places: int):
        device = prompts.input_ids.device
        self.sampling = sampling
        self.uniforms = keyed_uniforms(
            sampling.seed,
            prompts.indices.unsqueeze(1),
            prompts.samples.unsqueeze(1),
            torch.arange(places, device=device),
        )
        self.never_drawn = torch.tensor(sampling.never_drawn, dtype=torch.int64, device=device)
        names = ["logprobs"] * (sampling.logprob_temperature is not None) + ["entropy"] * sampling.with_entropy
        self.recorded = {name: torch.zeros(len(prompts), places, device=device) for name in names}

    def draw(self, logits: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Draw one token for each of B responses, and record the tokens' log-probs; returns the tokens, (B, 1) int64.

        Args:
            logits: (B, V) in any float dtype.
            rows: (B,) int64, the responses' rows in the batch of prompts.
            places: (B,) int64, the tokens' positions in the responses, counted from 0.
        """
        sampling = self.sampling
        choice = self._without_never_drawn(logits)[:, : sampling.vocabulary_size]
        if sampling.temperature == 0.0:
            tokens = choice.argmax(-1)
        else:
            tokens = sample_tokens(choice, self.uniforms[rows, places], sampling.temperature)
        self.record(logits, tokens, rows, places)
        return tokens.unsqueeze(1)

    def record(self, logits: Tensor, tokens: Tensor, rows: Tensor, places: Tensor) -> None:
        """Record the log-probs and entropies of tokens (B,), which this or another sampler drew from these logits.
        Other arguments: as in `draw`."""
        sampling = self.sampling
        if sampling.logprob_temperature is not None:
            found = token_logprobs(logits, tokens, sampling.logprob_temperature, sampling.with_entropy)
            for column, values in zip(self.recorded.values(), found):
                column[rows, places] = values

    def possible(self, logits: Tensor) -> Tensor:
        """A new tensor with the logits (B, V), set to -inf for tokens that must not be drawn. It is for another sampler
        that draws the tokens itself."""
        unknown = torch.arange(logits.shape[1], device=logits.device) >= (self.sampling.vocabulary_size or torch.inf)
        return self._without_never_drawn(logits).masked_fill(unknown, -torch.inf)

    def _without_never_drawn(self, logits: Tensor) -> Tensor:
        return logits.index_fill(1, self.never_drawn, -torch.inf) if len(self.never_drawn) else logits


def rollout_of(
    prompts: PromptBatch, requests: Sequence[Request], pad_token_id: int, recorded: Mapping[str, Tensor] | None = None
) -> Rollout:
    """The rollout of finished requests. There is one request for each row of the prompts, in the prompts' order.

    recorded: {name of a field of Rollout: (B, T or more) float32}.
    """
    device, width = prompts.input_ids.device, max(len(request.tokens) for request in requests)
    responses = torch.tensor([request.tokens + [pad_token_id] * (width - len(request.tokens)) for request in requests])
    lengths = torch.tensor([len(request.tokens) for request in requests], device=device)
    response_mask = torch.arange(width, device=device) < lengths.unsqueeze(1)
    return Rollout(
        sequences=torch.cat([prompts.input_ids, responses.to(device)], 1),
        attention_mask=torch.cat([prompts.attention_mask, response_mask.long()], 1),
        response_mask=response_mask,
        ended=torch.tensor([request.ended for request in requests], device=device),
        indices=prompts.indices,
        samples=prompts.samples,
        **{name: torch.where(response_mask, column[:, :width], 0.0) for name, column in (recorded or {}).items()},
    )


def prompts_of_group(prompts: PromptBatch, group: RankGroup) -> tuple[PromptBatch, slice]:
    """Returns (the prompts of all ranks of the group, the slice of this rank's rows). The prompts are equal on all
    ranks of the group. All ranks of the group call this together."""
    if group.size == 1:
        return prompts, slice(0, len(prompts))
    by_rank = group.all_objects(prompts.to("cpu"))
    first = sum(len(one) for one in by_rank[: group.place])
    return _joined_prompts(by_rank).to(prompts.input_ids.device), slice(first, first + len(prompts))


def _joined_prompts(batches: Sequence[PromptBatch]) -> PromptBatch:
    """The rows of all batches, one batch after the other, padded on the left with masked tokens to the width of the
    widest."""
    width = max(batch.input_ids.shape[1] for batch in batches)

    def columns(name: str) -> Tensor:
        parts = [getattr(batch, name) for batch in batches]
        return torch.cat([F.pad(part, (width - part.shape[1], 0)) for part in parts])

    return PromptBatch(
        columns("input_ids"),
        columns("attention_mask"),
        torch.cat([batch.indices for batch in batches]),
        torch.cat([batch.samples for batch in batches]),
        None if batches[0].most is None else torch.cat([batch.most for batch in batches if batch.most is not None]),
        batches[0].first_row,
    )


def copied(rollout: Rollout, device: torch.device | str) -> Rollout:
    """A copy of the rollout on this device, whose tensors have memory of their own. If a tensor were a view, sending it
    to another process would send the whole base tensor."""
    columns = {column.name: getattr(rollout, column.name) for column in fields(rollout)}
    return replace(
        rollout, **{name: tensor.to(device, copy=True) for name, tensor in columns.items() if tensor is not None}
    )


def joined(rollouts: Sequence[Rollout], pad_token_id: int) -> Rollout:
    """The rows of all rollouts, one rollout after the other, as wide as the longest prompt and the longest response.

    A field that may be None must be None in all rollouts or in none of them.
    """
    pieces = [rollout.select(slice(None)) for rollout in rollouts]
    prompt = max(piece.prompt_length for piece in pieces)
    response = max(piece.response_length for piece in pieces)

    columns: dict[str, Tensor] = {}
    for name in [column.name for column in fields(Rollout)]:
        found = []
        for piece in pieces:
            tensor = getattr(piece, name)
            left, right = prompt - piece.prompt_length, response - piece.response_length
            if tensor is not None and tensor.dim() == 2:
                whole = name in ("sequences", "attention_mask")
                fill = pad_token_id if name == "sequences" else 0
                tensor = F.pad(tensor, (left if whole else 0, right), value=fill)
            found.append(tensor)
        if found[0] is not None:
            columns[name] = torch.cat(found)
    return Rollout(**columns)
