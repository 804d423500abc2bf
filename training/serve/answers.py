"""Answers in OpenAI's form."""

import secrets
import time
from collections.abc import Iterable, Sequence

from training.serve.generation import TokenLogprobs
from training.serve.models import ServedModel
from training.serve.service import Response


class Completions:
    """POST /v1/completions: what is sent of its responses."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: ServedModel):
        self.model, self.created, self.id = model, int(time.time()), f"{self.prefix}-{secrets.token_hex(12)}"
        self._offsets: dict[int, int] = {}
        self._before = model.tokenizer("a", add_special_tokens=False)["input_ids"][-1]

    def whole(self, responses: Sequence[Response]) -> dict:
        """The answer with all responses."""
        choices = [
            self._choice(number, response.text, response.logprobs, response.reason)
            for number, response in enumerate(responses)
        ]
        return {**self._head(self.kind), "choices": choices, "usage": usage(responses)}

    def opening(self, count: int) -> list[dict]:
        """The chunks that stand before all text of a stream with this many responses."""
        return []

    def chunk(self, number: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str | None) -> dict:
        """A chunk of a stream: what is added to a response."""
        return {**self._head(self.chunk_kind), "choices": [self._piece(number, text, logprobs, reason)]}

    def usage_chunk(self, responses: Sequence[Response]) -> dict:
        """The last chunk of a stream, where it is asked for."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": usage(responses)}

    def _head(self, kind: str) -> dict:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}

    def _choice(self, number: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str | None) -> dict:
        told = self._logprobs(number, logprobs) if logprobs else None
        return {"index": number, "text": text, "logprobs": told, "finish_reason": reason}

    def _piece(self, number: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str | None) -> dict:
        return self._choice(number, text, logprobs, reason)

    def _logprobs(self, number: int, logprobs: Sequence[TokenLogprobs]) -> dict:
        words, offsets = [self._word(entry.token) for entry in logprobs], []
        for word in words:
            offsets.append(self._offsets.get(number, 0))
            self._offsets[number] = offsets[-1] + len(word)
        return {
            "tokens": words,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [{self._word(token): value for token, value in entry.top} for entry in logprobs],
            "text_offset": offsets,
        }

    def _word(self, token: int) -> str:
        """What a token adds to a text; decoded behind another one, as many tokenizers drop the space of the first."""
        decode = self.model.tokenizer.decode
        return decode([self._before, token]).removeprefix(decode([self._before]))


class ChatCompletions(Completions):
    """POST /v1/chat/completions: the same for messages."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, count: int) -> list[dict]:
        """A chunk for each response that says whose message it is."""
        role = {"role": "assistant", "content": ""}
        return [
            {
                **self._head(self.chunk_kind),
                "choices": [{"index": number, "delta": role, "logprobs": None, "finish_reason": None}],
            }
            for number in range(count)
        ]

    def _choice(self, number: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str | None) -> dict:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": number, "message": message, **self._ending(number, logprobs, reason)}

    def _piece(self, number: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str | None) -> dict:
        return {"index": number, "delta": {"content": text} if text else {}, **self._ending(number, logprobs, reason)}

    def _ending(self, number: int, logprobs: Sequence[TokenLogprobs], reason: str | None) -> dict:
        return {"logprobs": self._logprobs(number, logprobs) if logprobs else None, "finish_reason": reason}

    def _logprobs(self, number: int, logprobs: Sequence[TokenLogprobs]) -> dict:
        content = [
            {
                **self._entry(entry.token, entry.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict:
        word = self._word(token)
        return {"token": word, "logprob": logprob, "bytes": list(word.encode("utf-8", "replace"))}


def ending(response: Response, score: float | None, is_chat: bool) -> dict:
    """What PUT / says of a response beside its text. is_chat: whether messages were sent."""
    told = {"score": score, "tokens": len(response.tokens), "finish_reason": response.reason}
    if response.wanted.model.has_template:
        told["chat_template"] = "applied" if is_chat else "not applied"
    return told


def usage(responses: Iterable[Response]) -> dict:
    """How many tokens were read and drawn; a prompt with several responses counts once."""
    prompts: dict[int, int] = {}
    drawn = 0
    for response in responses:
        prompts[id(response.wanted.prompt_ids)] = len(response.wanted.prompt_ids)
        drawn += len(response.tokens)
    read = sum(prompts.values())
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def models_list(models: Iterable[ServedModel], created: int, context: int) -> dict:
    """GET /v1/models."""
    data = [
        {"id": model.name, "object": "model", "created": created, "owned_by": "local", "max_model_len": context}
        for model in models
    ]
    return {"object": "list", "data": data}
