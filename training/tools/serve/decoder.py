"""Decodes one model's responses in a batch, which responses can join and leave at any time.

    decoder.join([Generation(prompt_ids, Settings(max_tokens=20, seed=0), ends, tokenizer), ...])
    while decoder.living:
        decoder.step()

The cache and the forward passes are the same as in rollouts. The decoding loop of rollouts (engine/rollout/decode.py)
is not used: it needs all prompts at the start, has one temperature for all responses, and checks for end tokens only
once in several steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.algo.sampling import keyed_uniforms, sample_tokens
from engine.rollout.cache import Batch, SlotCache
from engine.rollout.passes import passes_of, takes_slot_masks
from engine.rollout.request import rows_to_move
from training.data.tokens import padded

GREEDY_BELOW = 1e-5  # below this temperature the most probable token is taken: divided logits would overflow
BEFORE = 8  # prompt tokens that are decoded together with a response: many tokenizers drop a text's first space
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's text for the bytes of an incomplete character


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings for drawing one response.

    max_tokens: largest number of tokens of the response. temperature: sampling temperature; 0 to take the most probable
    token each time. top_p: probability of the nucleus from which tokens are drawn. seed: key of the random numbers; the
    same prompt with the same seed gets the same response. stop: strings that end the response and are not part of its
    text.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int
    stop: tuple[str, ...] = ()


class Generation:
    """A response that is being drawn. Only the drawing thread changes it; other threads may read it.

    prompt_ids: token ids of the prompt. ends: the tokens that end a response; the end token becomes part of `tokens`.
    changed: function that is called in the drawing thread when `pieces`, `reason` or `error` has changed.
    tokens: the tokens drawn so far. pieces: the pieces of the text that will not change any more. reason: None until
    the text is complete; then "stop" (ended by an end token or stop string) or "length". error: a message if drawing
    failed. cancelled: whether the response is not needed any more.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        settings: Settings,
        ends: frozenset[int],
        tokenizer,
        changed: Callable[[], None] = lambda: None,
    ):
        self.prompt_ids, self.settings, self.ends, self.changed = list(prompt_ids), settings, ends, changed
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.reason: str | None = None
        self.error: str | None = None
        self.cancelled = False
        self._text = ResponseText(tokenizer, prompt_ids, settings.stop)
        zeros = torch.zeros(settings.max_tokens, dtype=torch.int64)
        self.uniforms = keyed_uniforms(settings.seed, zeros, zeros, torch.arange(settings.max_tokens)).tolist()

    @property
    def ended(self) -> bool:
        """Whether the response has ended."""
        return self.reason is not None or self.error is not None

    @property
    def read(self) -> int:
        """The number of tokens of prompt and response that the model has read: all but the last drawn token."""
        return len(self.prompt_ids) + len(self.tokens) - 1

    def take(self, token: int) -> None:
        """Append a drawn token, and decide whether the response has ended."""
        self.tokens.append(token)
        text, reason = self._text.add(token), None
        if token in self.ends or self._text.stopped:
            reason = "stop"
        elif len(self.tokens) == self.settings.max_tokens:
            reason = "length"
        if reason is not None:
            text += self._text.finish()
            reason = "stop" if self._text.stopped else reason
        if text:
            self.pieces.append(text)
        self.reason = reason
        if text or reason:
            self.changed()

    def fail(self, message: str) -> None:
        """End the response with an error."""
        if not self.ended:
            self.error = message
            self.changed()


class Decoder:
    """Decodes the responses of one model. Each step draws one token of each response. All methods have to be called by
    the same thread.

    living: the responses that are being drawn; living[i] is in row i of the batch. drawn: number of tokens drawn so
    far, over all responses.

    Args:
        model: a causal language model in eval mode.
        pad_id: id of the pad token.
        vocabulary_size: token ids from this number on are never drawn.
        rows: largest number of responses that are decoded at the same time.
        context: largest number of tokens of a prompt and its response together.
        decoding: how the forward passes of single tokens are made, one of engine.rollout.passes.DECODING.
    """

    def __init__(
        self, model: PreTrainedModel, pad_id: int, vocabulary_size: int, rows: int, context: int, decoding: str = "auto"
    ):
        self.pad_id, self.vocabulary_size, self.rows, self.context = pad_id, vocabulary_size, rows, context
        self.device = next(model.parameters()).device
        self.living: list[Generation] = []
        self.drawn = 0
        self.cache = SlotCache()
        with torch.inference_mode():
            self.passes = passes_of(model, self.cache, takes_slot_masks(model), decoding)
            self.cache.reserve(rows, context + max(64, context // 4))
            self.slots = self.cache.room.slots
            self._begin()

    @property
    def room(self) -> int:
        """The number of responses that can join now."""
        return self.rows - len(self.living)

    @torch.inference_mode()
    def join(self, generations: Sequence[Generation]) -> None:
        """Add new responses to the batch: read their prompts and draw their first tokens. generations: at most `room`
        responses."""
        ids, mask = (
            tensor.to(self.device)
            for tensor in padded([generation.prompt_ids for generation in generations], self.pad_id, left=True)
        )
        logits = self.passes.prompts(ids, mask, len(self.living), self.batch.slot)
        self.living += generations
        self.batch.join(mask, self._drawn(generations, logits))
        self._leave()

    @torch.inference_mode()
    def step(self) -> None:
        """Draw the next token of each living response."""
        living, batch = self.living, self.batch
        if not living:
            return
        batch.make_room(1, self.context)  # a prompt of any length must fit before the slot
        batch.mask[:, batch.slot] = True
        positions = torch.tensor([[generation.read] for generation in living], device=self.device)
        start = batch.slot - max(generation.read for generation in living)  # no living row has a token before it
        logits = self.passes.tokens(batch.pending, positions, batch.mask, start, batch.slot)
        batch.slot += 1
        batch.pending = self._drawn(living, logits)
        self._leave()

    def fail(self, message: str) -> None:
        """End all living responses with an error, and begin an empty batch."""
        for generation in self.living:
            generation.fail(message)
        self._begin()

    def _begin(self) -> None:
        self.living = []
        with torch.inference_mode():
            self.batch = Batch(self.cache, self.rows, self.slots, self.context, self.device)

    def _drawn(self, generations: Sequence[Generation], logits: Tensor) -> Tensor:
        """Draw a token for each of B generations from logits (B, V), and append it to the generation. Returns the
        tokens, (B, 1) int64."""
        logits = logits[:, : self.vocabulary_size]
        settings = [generation.settings for generation in generations]
        uniforms = [generation.uniforms[len(generation.tokens)] for generation in generations]
        tokens = draw(
            logits,
            torch.tensor(uniforms, dtype=torch.float64, device=self.device),
            torch.tensor([each.temperature for each in settings], device=self.device),
            torch.tensor([each.top_p for each in settings], device=self.device),
        )
        self.drawn += len(generations)
        for generation, token in zip(generations, tokens.tolist(), strict=True):
            generation.take(token)
        return tokens.unsqueeze(1)

    def _leave(self) -> None:
        """Remove responses that have ended or are cancelled."""
        stays = [not (generation.ended or generation.cancelled) for generation in self.living]
        if all(stays):
            return
        if not any(stays):
            self._begin()
            return
        longest = max(generation.read for generation in self.living)
        sources, targets, kept = rows_to_move(stays)
        for source, target in zip(sources, targets, strict=True):
            self.living[target] = self.living[source]
        del self.living[kept:]
        self.batch.move(sources, targets, kept, longest)


def draw(logits: Tensor, uniforms: Tensor, temperatures: Tensor, top_ps: Tensor) -> Tensor:
    """Draw a token for each row. Each row has its own random number, so the token does not depend on other rows.

    Args:
        logits: (B, V) in any float dtype.
        uniforms: (B,) float64 in [0, 1), from keyed_uniforms.
        temperatures: (B,) float32; 0 to take the most probable token.
        top_ps: (B,) float32 in (0, 1]; the token is drawn from a nucleus with at least this probability (`nucleus`).

    Returns: (B,) int64.
    """
    greedy = temperatures < GREEDY_BELOW
    if greedy.all():
        return logits.argmax(-1)
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures).unsqueeze(1)
    if (top_ps < 1.0).any():
        scaled = nucleus(scaled, top_ps)
    return torch.where(greedy, logits.argmax(-1), sample_tokens(scaled, uniforms))


def nucleus(logits: Tensor, top_ps: Tensor) -> Tensor:
    """The logits (B, V), with -inf for all tokens outside of the nucleus. The nucleus of a row is its smallest set of
    most probable tokens whose probabilities add up to at least top_p.

    top_ps: (B,) in (0, 1]. Source: Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1.
    """
    probabilities, order = torch.softmax(logits.float(), -1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    left_out = (before >= top_ps.unsqueeze(1)) & (top_ps.unsqueeze(1) < 1.0)
    left_out[:, 0] = False  # needed if a tiny top_p became 0 in float32
    return logits.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), -torch.inf)


class ResponseText:
    """Makes the text of a response whose tokens arrive one by one.

    Special tokens are left out. Text that may be the beginning of a stop string is held back until the next tokens
    decide. The text ends before the first complete stop string.

    stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer, prompt_ids: Sequence[int], stops: Sequence[str] = ()):
        self.tokenizer, self.stops, self.stopped = tokenizer, tuple(stops), False
        self._ids = list(prompt_ids[-BEFORE:])
        # Tokens from index `_start` on are decoded together. The text of the tokens before index `_said` has already
        # been returned.
        self._start, self._said = 0, len(self._ids)
        self._held = ""

    def add(self, token: int) -> str:
        """Append the next token. Returns the additional text that can no longer change."""
        self._ids.append(token)
        text = self._decoded()
        return "" if text.endswith(UNFINISHED) else self._past_stops(self._new(text))

    def finish(self) -> str:
        """The rest of the text. Called when no further token follows."""
        text = self._past_stops(self._new(self._decoded()))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _decoded(self) -> str:
        return self.tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)

    def _new(self, text: str) -> str:
        """The part of `text` that has not been returned before. text: the decoded tokens from `_start` on."""
        known = self.tokenizer.decode(self._ids[self._start : self._said], skip_special_tokens=True)
        new = text[len(known) :] if text.startswith(known) else ""
        if new:  # not for a special token: later tokens are still decoded together with text, to keep their first space
            self._start = self._said
        self._said = len(self._ids)
        return new

    def _past_stops(self, new: str) -> str:
        text = self._held + new
        found = [place for place in map(text.find, self.stops) if place >= 0]
        if found or self.stopped:
            self.stopped, self._held = True, ""
            return text[: min(found)] if found else ""
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
