"""A response in the making: how it is drawn, what there is of it, who is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algo.sampling import keyed_uniforms
from training.serve.response_text import ResponseText


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one response is drawn.

    max_tokens: that it may have. temperature: 0 for the most probable token each time. top_p: of its nucleus.
    seed, sample: the keys of its random numbers; the same ones give the same response to a prompt.
    stop: texts that end it, and are not part of its text.
    logprobs: of how many of the most probable tokens log-probs are told beside those drawn; None for no log-probs.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int
    sample: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-prob of a token that was drawn, and the most probable ones with theirs, in the model's own distribution,
    whatever the temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Update:
    """What has been added to a response.

    text: what can be said now; may be empty. logprobs: of the tokens drawn since the last update, if they are asked
    for. reason: "stop" (an end token, or a stop string) or "length", once it has ended. error: what went wrong here.
    """

    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    reason: str | None = None
    error: str | None = None


class Generation:
    """A response in the making.

    prompt_ids: what the model reads first. ends: the tokens that end a response, and belong to it. tell: is called with
    each Update, by the thread that draws.
    tokens: drawn so far. ended: whether there are no more. cancelled: whether nobody wants it any more.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        settings: Settings,
        ends: frozenset[int],
        tokenizer,
        tell: Callable[[Update], None],
    ):
        self.prompt_ids, self.settings, self.ends, self.tell = list(prompt_ids), settings, ends, tell
        self.text = ResponseText(tokenizer, prompt_ids, settings.stop)
        self.tokens: list[int] = []
        self.ended = self.cancelled = False
        zeros = torch.zeros(settings.max_tokens, dtype=torch.int64)
        places = torch.arange(settings.max_tokens)
        self.uniforms = keyed_uniforms(settings.seed, zeros, zeros + settings.sample, places).tolist()

    @property
    def read(self) -> int:
        """Tokens of prompt and response that the model has read: all but the last that was drawn."""
        return len(self.prompt_ids) + len(self.tokens) - 1

    def take(self, token: int, logits: Tensor) -> None:
        """Take the token that was drawn from these logits (V,)."""
        self.tokens.append(token)
        logprobs = (
            (_token_logprobs(logits, token, self.settings.logprobs),) if self.settings.logprobs is not None else ()
        )
        text, reason = self.text.add(token), None
        if token in self.ends or self.text.stopped:
            reason = "stop"
        elif len(self.tokens) == self.settings.max_tokens:
            reason = "length"
        if reason is not None:
            self.ended = True
            text += self.text.finish()
            reason = "stop" if self.text.stopped else reason
        if text or logprobs or reason:
            self.tell(Update(text, logprobs, reason))

    def fail(self, message: str) -> None:
        """End it for what went wrong."""
        if not self.ended:
            self.ended = True
            self.tell(Update(error=message))


def _token_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    logprobs = torch.log_softmax(logits.float(), -1)
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return TokenLogprobs(token, logprobs[token].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
