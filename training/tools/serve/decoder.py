"""Decodes one model's responses in a batch, which responses join and leave at any time.

    decoder.join([Generation(prompt_ids, Settings(max_tokens=20, seed=0), ends, tokenizer), ...])
    while decoder.living:
        decoder.step()

The cache and the forward passes are those of rollouts. The loop of rollouts (engine/rollout/decode.py) is another one:
it knows all prompts from the start, has one temperature for all, and looks at drawn tokens only every few tokens.
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

GREEDY_BELOW = 1e-5  # lower temperatures take the most probable token: divided logits would grow without bound
BEFORE = 8  # tokens of the prompt that are decoded with a response: many tokenizers drop the first space of a text
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's text for the bytes of an incomplete character


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one response is drawn.

    max_tokens: most tokens of the response. temperature: 0 for the most probable token each time. top_p: probability of
    the nucleus that tokens are drawn from. seed: key of the random numbers; a prompt with the same seed gets the same
    response. stop: strings that end the response and are not part of its text.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int
    stop: tuple[str, ...] = ()


class Generation:
    """A response while it is drawn. Only the drawing thread changes it; other threads may read it.

    prompt_ids: token ids of the prompt. ends: the tokens that end a response; the end token is part of `tokens`.
    changed: called in the drawing thread when `pieces`, `reason` or `error` has changed.
    tokens: drawn so far. pieces: pieces of the text that will not change any more. reason: None until the text is
    complete; then "stop" (an end token or stop string) or "length". error: a message if drawing failed. cancelled:
    whether the response is not needed any more.
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
        """How many tokens of prompt and response the model has read: all but the last drawn one."""
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
    """Decodes the responses of one model, one token of each per step. All calls come from one thread.

    living: the responses that are being drawn; response i is in row i of the batch. drawn: number of tokens drawn so
    far, over all responses.

    Args:
        model: a causal language model in eval mode.
        vocabulary_size: larger token ids and this one are never drawn.
        rows: how many responses are decoded at the same time.
        context: most tokens of a prompt and its response together.
        decoding: how single tokens go through the model, one of engine.rollout.passes.DECODING.
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
        """How many further responses can join now."""
        return self.rows - len(self.living)

    @torch.inference_mode()
    def join(self, generations: Sequence[Generation]) -> None:
        """Read the prompts of new responses, at most `room`, and draw their first tokens."""
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
        batch.make_room(1, self.context)  # so that a prompt of any length fits before the slot
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
        """Draw a token for each of B generations from logits (B, V), and append it; returns them, (B, 1) int64."""
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
    """One token for each row, drawn with the row's own uniform number, so that it depends on no other row.

    Args:
        logits: (B, V) in any float dtype.
        uniforms: (B,) float64 in [0, 1), from keyed_uniforms.
        temperatures: (B,) float32; 0 for the most probable token.
        top_ps: (B,) float32 in (0, 1], the smallest probability of the nucleus (`nucleus`).

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
    """The logits (B, V), with -inf outside the smallest set of most probable tokens that has at least this probability.

    top_ps: (B,) in (0, 1]. Source: Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1.
    """
    probabilities, order = torch.softmax(logits.float(), -1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    left_out = (before >= top_ps.unsqueeze(1)) & (top_ps.unsqueeze(1) < 1.0)
    left_out[:, 0] = False  # also if a tiny top_p became 0 in float32
    return logits.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), -torch.inf)


class ResponseText:
    """The text of a response whose tokens come one by one.

    Special tokens are left out. Text that may be the beginning of a stop string is held back until the next tokens
    decide. The text ends before the first complete stop string.

    stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer, prompt_ids: Sequence[int], stops: Sequence[str] = ()):
        self.tokenizer, self.stops, self.stopped = tokenizer, tuple(stops), False
        self._ids = list(prompt_ids[-BEFORE:])
        # Tokens from `_start` on are decoded together; the text of those before `_said` has been returned.
        self._start, self._said = 0, len(self._ids)
        self._held = ""

    def add(self, token: int) -> str:
        """Append the next token; returns the further text that is certain now."""
        self._ids.append(token)
        text = self._decoded()
        return "" if text.endswith(UNFINISHED) else self._past_stops(self._new(text))

    def finish(self) -> str:
        """The rest of the text, when no further token follows."""
        text = self._past_stops(self._new(self._decoded()))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _decoded(self) -> str:
        return self.tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)

    def _new(self, text: str) -> str:
        """The part of `text`, decoded from `_start` on, that has not been returned before."""
        known = self.tokenizer.decode(self._ids[self._start : self._said], skip_special_tokens=True)
        new = text[len(known) :] if text.startswith(known) else ""
        if new:  # for a special token nothing is new: later tokens are still decoded after the last text, for a space
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
