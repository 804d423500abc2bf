"""Answers that are sent while they are drawn, as server-sent events."""

import json
from collections.abc import AsyncIterator
from contextlib import ExitStack

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from training.serve.answers import Completions, ending
from training.serve.errors import RequestError, error_body, say
from training.serve.service import Responses, Service

DONE = "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A stream of events. held: contexts that are left when it has ended, or its client has gone."""

    def __init__(self, events: AsyncIterator[str], held: ExitStack):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        with self.held:
            await super().__call__(scope, receive, send)


def event(data: dict) -> str:
    """One event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def ending_with_error(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events; where they fail an error is the last one, and the stream ends without DONE."""
    try:
        async for each in events:
            yield each
    except RequestError as error:
        say("a stream", error.status, error.message)
        yield event(error_body(error.status, error.message, error.param, error.code))


async def completion_events(form: Completions, responses: Responses, with_usage: bool) -> AsyncIterator[str]:
    """A stream in OpenAI's form."""
    for chunk in form.opening(len(responses.whole)):
        yield event(chunk)
    async for number, update in responses.updates():
        yield event(form.chunk(number, update.text, update.logprobs, update.reason))
    if with_usage:
        yield event(form.usage_chunk(responses.whole))
    yield DONE


async def comparison_events(service: Service, responses: Responses, seed: int, is_chat: bool) -> AsyncIterator[str]:
    """What PUT / streams: pieces of each model's text, then what `ending` says of it."""
    yield event({"seed": seed})
    async for number, update in responses.updates():
        response = responses.whole[number]
        name = response.wanted.model.name
        if update.text:
            yield event({"model": name, "text": update.text})
        if update.reason is not None:
            score = None
            if service.scorer is not None:
                score = (await service.scores([response.wanted.prompt_ids + response.tokens]))[0]
            yield event({"model": name, **ending(response, score, is_chat)})
    yield DONE
