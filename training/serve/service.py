"""What a request asks of the worker: responses and scores, and how many of them may be asked for at once."""

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from engine.errors import UserError
from training.data.chat import render
from training.serve.errors import ClientGone, RequestError
from training.serve.generation import Generation, Settings, TokenLogprobs, Update
from training.serve.models import ServedModel, ServedModels
from training.serve.requests import Message
from training.serve.scoring import scores_of
from training.serve.worker import FAILED, ScoreJob, Worker

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A response that is asked for: whose, to which tokens, drawn how."""

    model: ServedModel
    prompt_ids: list[int]
    settings: Settings


@dataclass(slots=True)
class Response:
    """A response that is whole. reason: "stop" or "length"."""

    wanted: Wanted
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None


class Service:
    """Models, their worker, and the count of what it has been asked.

    queue_size: responses and texts to score that may be in the making or wait. most_tokens: of a response.
    """

    def __init__(self, models: ServedModels, rows: int, queue_size: int, most_tokens: int):
        self.models, self.queue_size, self.most_tokens = models.by_name, queue_size, most_tokens
        self.scorer, self.context = models.scorer, models.context
        self.taken = 0
        self._open: set[Responses] = set()
        # One thread, because a TextEncoder remembers what it was asked last.
        self._texts = ThreadPoolExecutor(1, "texts")
        self._templates = ThreadPoolExecutor(1, "templates")  # of its own: a template may take seconds
        decoders = {name: model.decoder for name, model in self.models.items()}
        self.worker = Worker(decoders, self._scores if self.scorer is not None else None, rows)

    def start(self) -> None:
        """Begin to answer."""
        self.worker.start()

    def stop(self) -> None:
        """End, whatever is under way."""
        self.worker.stop()
        self._texts.shutdown()
        self._templates.shutdown(wait=False, cancel_futures=True)

    def abort(self) -> None:
        """End all responses under way, and have their requests answered so."""
        for responses in list(self._open):
            responses.abort("the service is ending, and this was not done in time")

    def state(self) -> dict:
        """What GET /health says: which models there are, which of them have a chat template, how much is asked of them
        now, and tokens drawn so far."""
        decoders = self.worker.decoders.values()
        return {
            "status": "ok",
            "models": list(self.models),
            "chat_models": [name for name, model in self.models.items() if model.has_template],
            "reward_model": self.scorer is not None,
            "asked_for": self.taken,
            "decoding": sum(len(decoder.living) for decoder in decoders),
            "tokens_drawn": sum(decoder.drawn for decoder in decoders),
        }

    def model(self, name: str) -> ServedModel:
        """The model of this name. Raises: RequestError."""
        if name not in self.models:
            known = ", ".join(self.models) or "none"
            raise RequestError(404, f"there is no model {name!r} here. There is: {known}", "model", "model_not_found")
        return self.models[name]

    async def encoded(self, encode: Callable[[], Found]) -> Found:
        """What this gives that turns texts into tokens, without holding up other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, encode)

    async def rendered(self, model: ServedModel, messages: Sequence[Message]) -> str:
        """What a model's chat template makes of messages, up to where it begins the answer. Raises: RequestError."""
        plain = [message.plain() for message in messages]
        rendering = functools.partial(render, model.tokenizer, plain, "messages", add_generation_prompt=True)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._templates, rendering)
        except UserError as error:
            raise RequestError(400, str(error), "messages") from None

    @contextlib.contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Within this context so many responses or texts may be asked for. Raises: RequestError where they have no
        room beside those of other requests, or never could."""
        if count > self.queue_size:
            told = f"{count} responses or texts in one request; at most {self.queue_size} are taken (--queue_size)"
            raise RequestError(400, told, code="too_many")
        if self.taken + count > self.queue_size:
            told = f"{self.taken} responses or texts are waited for, and {count} more have no room. Try again"
            raise RequestError(429, told, code="rate_limit_exceeded", headers={"retry-after": "1"})
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The reward model's scores of sequences of token ids; raises RequestError where they could not be computed."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future] = [loop.create_future() for _ in sequences]

        def resolve(future: asyncio.Future, score: float | None) -> None:
            if not future.done():
                future.set_result(score)

        def teller(future: asyncio.Future) -> Callable[[float | None], None]:
            return lambda score: _call_soon(loop, resolve, future, score)

        jobs = [ScoreJob(ids, teller(future)) for ids, future in zip(sequences, futures, strict=True)]
        try:
            for job in jobs:
                self.worker.give_score(job)
            found = await asyncio.gather(*futures)
        finally:
            for job in jobs:
                job.cancelled = True
        if None in found:
            raise RequestError(500, FAILED)
        if not all(map(math.isfinite, found)):
            raise RequestError(500, "the reward model gives no finite score to this")
        return found

    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        assert self.scorer is not None
        return scores_of(self.scorer.scorer, sequences, self.scorer.pad_id)


class Responses:
    """The responses that one request asks for, as they are drawn; those that are not done when the context ends are
    drawn no further.

        with Responses(service, wanted) as responses:
            async for number, update in responses.updates(): ...

    whole: what there is of each, in the order that they were asked for.
    """

    def __init__(self, service: Service, wanted: Sequence[Wanted]):
        self.service, self.whole = service, [Response(each) for each in wanted]
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Update]]()
        self._generations = [
            Generation(each.prompt_ids, each.settings, each.model.ends, each.model.tokenizer, self._teller(number))
            for number, each in enumerate(wanted)
        ]

    def __enter__(self) -> "Responses":
        self.service._open.add(self)
        for response, generation in zip(self.whole, self._generations, strict=True):
            self.service.worker.generate(response.wanted.model.name, generation)
        return self

    def __exit__(self, *_) -> None:
        self.service._open.discard(self)
        for generation in self._generations:
            generation.cancelled = True

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """The number of a response and what was added to it, until all are whole. Raises: RequestError where one
        failed."""
        left = len(self.whole)
        while left:
            number, update = await self._queue.get()
            await asyncio.sleep(0)  # where many have gathered, get returns at once, and nobody else would have a turn
            if update.error is not None:
                raise RequestError(503 if update.error != FAILED else 500, update.error)
            response = self.whole[number]
            response.text += update.text
            response.logprobs += update.logprobs
            if update.reason is not None:
                response.reason, response.tokens = update.reason, self._generations[number].tokens
                left -= 1
            yield number, update

    async def all(self) -> list[Response]:
        """The responses once all are whole."""
        async for _ in self.updates():
            pass
        return self.whole

    def abort(self, message: str) -> None:
        """Have the request that waits for them end with this message."""
        self._queue.put_nowait((0, Update(error=message)))

    def _teller(self, number: int) -> Callable[[Update], None]:
        return lambda update: _call_soon(self._loop, self._queue.put_nowait, (number, update))


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable, *given) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, with all that waited for this
        loop.call_soon_threadsafe(call, *given)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """What this coroutine returns; raises ClientGone, with the coroutine cancelled, once the client has gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
