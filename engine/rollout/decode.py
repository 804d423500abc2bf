"""The decoding loop: prompts are read once, then a token at a time; rows that have ended make room for others."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.algo.logprobs import token_logprobs
from engine.algo.sampling import keyed_uniforms, sample_tokens
from engine.experience import PromptBatch, Rollout
from engine.rollout.base import SamplingConfig
from engine.rollout.cache import SlotCache
from engine.rollout.families import takes_slot_masks
from engine.rollout.passes import Passes, passes_of
from engine.rollout.stops import stop_finder

CHECK_EVERY = 8  # tokens between two looks of the host at what was drawn


class Sampler:
    """Draws responses from models of one architecture; keeps the cache's memory from call to call.

    Args:
        rows_at_once: how many responses are decoded side by side; None for all.
        agree: where forward passes are collective, all ranks must make as many; this is then given a number on each
            and returns the largest. None where ranks need not wait for each other.
        decoding: how single tokens go through the model, one of engine.rollout.passes.DECODING. All but "plain" need
            a model without hooks, whose weights stay where they are.
    """

    def __init__(
        self,
        tokenizer,
        rows_at_once: int | None = None,
        agree: Callable[[int], int] | None = None,
        decoding: str = "plain",
    ):
        self.tokenizer, self.rows_at_once, self.decoding = tokenizer, rows_at_once, decoding
        self.agree = agree or (lambda number: number)
        # Without autograd's bookkeeping tokens of small models take a tenth less; ZeRO's hooks cannot do without.
        self.context = torch.no_grad if agree else torch.inference_mode
        self.cache = SlotCache()
        self.row_steps = 0  # of the last call: rows times decoding steps, to compare with the tokens produced
        self._slot_masks: bool | None = None
        self._passes: Passes | None = None

    def responses(self, model: nn.Module, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row, in the rows' order.

        model: a Hugging Face causal language model, with or without ZeRO's hooks; it is in eval mode meanwhile.
        """
        training = model.training
        model.eval()
        try:
            return self._responses(model, prompts, sampling)
        finally:
            model.train(training)

    def _responses(self, model: nn.Module, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        with self.context():
            if self._slot_masks is None:
                self._slot_masks = takes_slot_masks(model)
            if self._passes is None or self._passes.model is not model:
                self._passes = passes_of(model, self.cache, self._slot_masks, self.decoding)
            decoding = _Decoding(self, self._passes, prompts, sampling)
            decoding.run()
        self.row_steps = decoding.row_steps
        return decoding.rollout()

    def release_memory(self) -> None:
        """Give back the memory of keys and values, and let go of the model."""
        self.cache.free()
        self._passes = None


@dataclass(slots=True)
class _Row:
    """A response in the making: which prompt it answers, how long that is, and what the host has seen of it."""

    prompt: int
    prompt_length: int
    tokens: list[int] = field(default_factory=list)
    drawn: int = 0  # tokens, seen by the host or not
    ended: bool = False

    @property
    def length(self) -> int:
        """How many tokens of it the model has read: all but the last that was drawn."""
        return self.prompt_length + self.drawn - 1


class _Decoding:
    """One call of `Sampler.responses`.

    All rows are written at one slot of the cache (see SlotCache). Every CHECK_EVERY tokens the host looks at what was
    drawn: rows that have ended leave, and waiting prompts, longest first, take their place. Tokens drawn after an end
    before it was noticed are cut off; since each token's random number is its own, this changes nothing else.
    """

    def __init__(self, sampler: Sampler, passes: Passes, prompts: PromptBatch, sampling: SamplingConfig):
        self.passes, self.prompts, self.sampling = passes, prompts, sampling
        self.agree, self.cache = sampler.agree, sampler.cache
        self.find_stop = stop_finder(sampler.tokenizer, sampling.stop_strings)
        self.stops = set(sampling.stop_token_ids)
        self.never_drawn = torch.tensor(sampling.never_drawn, dtype=torch.int64, device=prompts.input_ids.device)
        self.rows_at_once = min(sampler.rows_at_once or len(prompts), len(prompts))
        lengths = prompts.attention_mask.sum(-1).tolist()
        self.rows = [_Row(index, length) for index, length in enumerate(lengths)]
        self.waiting = sorted(self.rows, key=lambda row: row.prompt_length)  # taken from the end
        self.living: list[_Row] = []
        self.device, longest, most = prompts.input_ids.device, max(lengths), sampling.max_new_tokens
        self.slots = slots_of_a_row(longest + most, waiting=self.rows_at_once < len(prompts))
        self.cache.reserve(self.rows_at_once, self.slots)
        if passes.sees_all_slots:
            self.slots = self.cache.room.slots  # the same for all calls
        self.slot = longest  # where the next token is written
        self.mask = torch.zeros(self.rows_at_once, self.slots, dtype=torch.bool, device=self.device)
        self.pending = torch.zeros(0, 1, dtype=torch.int64, device=self.device)  # drawn, and not yet read by the model
        self.uniforms = keyed_uniforms(
            sampling.seed,
            prompts.indices.unsqueeze(1),
            prompts.samples.unsqueeze(1),
            torch.arange(most + CHECK_EVERY, device=self.device),
        )
        recorded = () if sampling.logprob_temperature is None else ("logprobs", "entropy")
        self.recorded = {name: torch.zeros(len(prompts), most + CHECK_EVERY, device=self.device) for name in recorded}
        self.row_steps = 0

    def run(self) -> None:
        """Draw all responses."""
        while self.agree(len(self.waiting) + len(self.living)):
            joining = self._joining()
            if self.agree(len(joining)):
                self._join(joining)
            longest = max((self.sampling.max_new_tokens - row.drawn for row in self.living), default=0)
            self._draw(self.agree(min(CHECK_EVERY, longest)))
            self._leave()

    def rollout(self) -> Rollout:
        """All responses, in the prompts' order."""
        pad, width = self.sampling.pad_token_id, max(len(row.tokens) for row in self.rows)
        responses = torch.tensor([row.tokens + [pad] * (width - len(row.tokens)) for row in self.rows])
        lengths = torch.tensor([len(row.tokens) for row in self.rows], device=self.device)
        response_mask = torch.arange(width, device=self.device) < lengths.unsqueeze(1)
        prompts = self.prompts
        recorded = {name: torch.where(response_mask, column[:, :width], 0.0) for name, column in self.recorded.items()}
        return Rollout(
            sequences=torch.cat([prompts.input_ids, responses.to(self.device)], 1),
            attention_mask=torch.cat([prompts.attention_mask, response_mask.long()], 1),
            response_mask=response_mask,
            ended=torch.tensor([row.ended for row in self.rows], device=self.device),
            indices=prompts.indices,
            samples=prompts.samples,
            **recorded,
        )

    def _joining(self) -> list[_Row]:
        """The next prompts, once there is room for a good part of what fits: reading them holds up all others."""
        room = self.rows_at_once - len(self.living)
        if room < self.rows_at_once // 8:
            return []
        return [self.waiting.pop() for _ in range(min(room, len(self.waiting)))]

    def _join(self, joining: list[_Row]) -> None:
        """Read the prompts of new rows and draw their first tokens."""
        if not joining:
            self._keep_pace(1)
            return
        width, first = joining[0].prompt_length, len(self.living)
        chosen = torch.tensor([row.prompt for row in joining], device=self.device)
        ids, mask = (tensor[chosen, -width:] for tensor in (self.prompts.input_ids, self.prompts.attention_mask))
        logits = self.passes.prompts(ids, mask, first, self.slot)
        self.mask[first : first + len(joining)] = False
        self.mask[first : first + len(joining), self.slot - width : self.slot] = mask.bool()
        self.living += joining
        self.pending = torch.cat([self.pending, self._sample(logits, chosen, torch.zeros_like(chosen))])
        for row in joining:
            row.drawn = 1

    def _draw(self, count: int) -> None:
        """Draw `count` tokens for each living row, then let the host see all that it has not seen."""
        if not self.living:
            self._keep_pace(count)
            return
        living = self.living
        if self.slot + count > self.slots:
            self._move_left()
        start = self._start()
        chosen, lengths, drawn = torch.tensor(
            [(row.prompt, row.prompt_length, row.drawn) for row in living], device=self.device
        ).unbind(1)
        # A row with all its tokens goes no further: the model may have no more positions.
        steps = drawn.unsqueeze(1) + torch.arange(count, device=self.device)
        positions = lengths.unsqueeze(1) + steps.clamp(max=self.sampling.max_new_tokens - 1) - 1
        tokens = [self.pending]
        for step in range(count):
            self.mask[:, self.slot] = True
            logits = self.passes.tokens(tokens[-1], positions[:, step : step + 1], self.mask, start, self.slot)
            self.slot += 1
            tokens.append(self._sample(logits, chosen, steps[:, step]))
        self.pending = tokens[-1]
        self.row_steps += len(living) * count
        for row, seen in zip(living, torch.cat(tokens, 1).tolist()):
            row.drawn += count
            self._look(row, seen[len(seen) - (row.drawn - len(row.tokens)) :])

    def _look(self, row: _Row, new: list[int]) -> None:
        """Take the tokens that the host had not seen, up to the first end."""
        first_stop = next((place for place, token in enumerate(new) if token in self.stops), None)
        end = None if first_stop is None else len(row.tokens) + first_stop + 1
        row.tokens += new
        del row.tokens[self.sampling.max_new_tokens :]
        if self.sampling.stop_strings:
            end = self.find_stop(row.tokens[:end]) or end
        if end is not None and end <= len(row.tokens):
            row.ended = True
            del row.tokens[end:]

    def _leave(self) -> None:
        """Rows that have ended go; the last ones that stay take their places."""
        living, most = self.living, self.sampling.max_new_tokens
        stays = [not row.ended and len(row.tokens) < most for row in living]
        kept = sum(stays)
        holes = [place for place in range(kept) if not stays[place]]
        if holes:
            movers = [place for place in range(kept, len(living)) if stays[place]]
            self.cache.move_rows(movers, holes, self._start(), self.slot)
            self.mask[holes], self.pending[holes] = self.mask[movers], self.pending[movers]
            for hole, mover in zip(holes, movers):
                living[hole] = living[mover]
        del living[kept:]
        self.pending = self.pending[:kept]

    def _start(self) -> int:
        """The first slot that a living row has a token in."""
        return self.slot - max(row.length for row in self.living)

    def _move_left(self) -> None:
        """Lay down the living rows so that the longest begins at the first slot. Prompts that still wait fit before the
        others' end, as none is longer than one that has been taken."""
        rows, start = len(self.living), self._start()
        self.cache.shift(rows, start, self.slot, by=start)
        mask = self.mask[:rows, start : self.slot].clone()
        self.mask[:rows] = False
        self.slot -= start
        self.mask[:rows, : self.slot] = mask

    def _keep_pace(self, passes: int) -> None:
        """Make forward passes for nothing, since other ranks' passes wait for this rank's."""
        for _ in range(passes):
            self.passes.for_nothing(self.prompts.input_ids[:1, -1:])

    def _sample(self, logits: Tensor, chosen: Tensor, slots: Tensor) -> Tensor:
        """(B, 1) int64, the tokens in these response slots (B,) of the chosen prompts (B,)."""
        sampling = self.sampling
        choice = logits.index_fill(1, self.never_drawn, -torch.inf) if sampling.never_drawn else logits
        tokens = sample_tokens(
            choice[:, : sampling.vocabulary_size], self.uniforms[chosen, slots], sampling.temperature
        )
        if sampling.logprob_temperature is not None:
            self.recorded["logprobs"][chosen, slots], self.recorded["entropy"][chosen, slots] = token_logprobs(
                logits, tokens, sampling.logprob_temperature, with_entropy=True
            )
        return tokens.unsqueeze(1)


def slots_of_a_row(tokens: int, waiting: bool) -> int:
    """How many slots of the cache a row has, for prompts and responses of at most so many tokens together.

    Where no prompt waits, the last slot comes with the last token; else all rows go on to the right, and are moved back
    to the left now and then.
    """
    return tokens + CHECK_EVERY + (max(8 * CHECK_EVERY, tokens // 4) if waiting else 0)
