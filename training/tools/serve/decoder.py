"""One model's responses, decoded side by side; others may begin while these are under way.

    decoder.join([Generation(prompt_ids, Settings(max_tokens=20, seed=0), ends, tokenizer), ...])
    while decoder.living:
        decoder.step()

The cache, in which rows come and go, and the passes, recorded on CPUs and as CUDA graphs on GPUs, are those of the
rollouts. Their loop (engine/rollout/decode.py) is another one: it knows all its prompts when it begins, draws all of
them alike, and looks at what was drawn every few tokens only.
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

GREEDY_BELOW = 1e-5  # temperatures under it: the distribution is one token, and the logits would grow without bound
BEFORE = 8  # tokens of the prompt that a response is decoded behind: many tokenizers drop the space a text begins with
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer puts for the bytes of a character that is not complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one response is drawn.

    max_tokens: that it may have. temperature: 0 for the most probable token each time. top_p: of its nucleus.
    seed: the key of its random numbers; the same one gives the same response to a prompt.
    stop: texts that end it, and are not part of its text.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int
    stop: tuple[str, ...] = ()


class Generation:
    """A response in the making. The thread that draws changes it; others may look at it meanwhile.

    prompt_ids: what the model reads first. ends: the tokens that end a response, and belong to it. changed: is called
    by that thread once there is more to see.
    tokens: drawn so far. pieces: of its text, as far as that is sure. reason: "stop" (an end token, or a stop string)
    or "length", once all of its text is there. error: what went wrong. cancelled: whether nobody wants it any more.
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
        """Tokens of prompt and response that the model has read: all but the last that was drawn."""
        return len(self.prompt_ids) + len(self.tokens) - 1

    def take(self, token: int) -> None:
        """Take the token that was drawn."""
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
        """End it for what went wrong."""
        if not self.ended:
            self.error = message
            self.changed()


class Decoder:
    """Decodes the responses of one model, one token of each per step. All calls come from one thread.

    living: the responses under way, each in the row of the batch that is its place in the list. drawn: tokens of all so
    far.

    Args:
        model: a causal language model in eval mode.
        vocabulary_size: token ids from this on are never drawn.
        rows: how many responses are decoded side by side.
        context: the most tokens that a prompt and its response have together.
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
        """How many responses can begin now."""
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
        """Draw the next token of each response under way."""
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
        """End all responses under way for what went wrong, and begin with an empty batch."""
        for generation in self.living:
            generation.fail(message)
        self._begin()

    def _begin(self) -> None:
        self.living = []
        with torch.inference_mode():
            self.batch = Batch(self.cache, self.rows, self.slots, self.context, self.device)

    def _drawn(self, generations: Sequence[Generation], logits: Tensor) -> Tensor:
        """(B, 1) int64: the tokens that these generations, in the order of the logits (B, V), draw and take."""
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
        """Let go of responses that have ended or that nobody wants any more."""
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
    """One token of each row, by its own uniform number: what is drawn depends on no other row.

    Args:
        logits: (B, V) in any float dtype.
        uniforms: (B,) float64 in [0, 1), as keyed_uniforms makes them.
        temperatures: (B,) float32; 0 for the most probable token.
        top_ps: (B,) float32 in (0, 1], the probability that the nucleus has at least (`nucleus`).

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
    left_out[:, 0] = False  # of a top_p that float32 has no number for but 0, too
    return logits.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), -torch.inf)


class ResponseText:
    """The text of a response whose tokens come one by one.

    Special tokens are left out. Text that may turn out to be the beginning of a stop string is held back until that is
    known; of a stop string that is complete, and of what follows, nothing is said.

    stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer, prompt_ids: Sequence[int], stops: Sequence[str] = ()):
        self.tokenizer, self.stops, self.stopped = tokenizer, tuple(stops), False
        self._ids = list(prompt_ids[-BEFORE:])
        self._start, self._said = 0, len(self._ids)  # tokens from start on are decoded, those before `said` are known
        self._held = ""

    def add(self, token: int) -> str:
        """Take the next token; returns what can be said now."""
        self._ids.append(token)
        text = self._decoded()
        return "" if text.endswith(UNFINISHED) else self._past_stops(self._new(text))

    def finish(self) -> str:
        """What is left to be said once no token follows."""
        text = self._past_stops(self._new(self._decoded()))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _decoded(self) -> str:
        return self.tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)

    def _new(self, text: str) -> str:
        """What `text`, decoded from `_start` on, has beyond what was told; from now on it is known."""
        known = self.tokenizer.decode(self._ids[self._start : self._said], skip_special_tokens=True)
        new = text[len(known) :] if text.startswith(known) else ""
        if new:  # else a special token: what follows is still decoded behind the last text, for its space
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
