"""Responses and scores for requests: how many may be asked for at once, and the thread that computes them all.

with service.admitted(1), Responses(service, [Response(model, prompt_ids, settings)]) as responses:
    (response,) = await responses.all()
(score,) = await service.scores([response.prompt_ids + response.tokens])
"""

import asyncio
import contextlib
import functools
import math
import sys
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from engine.errors import UserError
from engine.experience import position_ids
from training.data.chat import render
from training.data.tokens import padded
from training.reporting.sample_tables import visible
from training.tools.serve.decoder import Decoder, Generation, Settings
from training.tools.serve.models import ServedModel, ServedModels, ServedScorer

FAILED = "the service could not compute this; its own log says why"
Found = TypeVar("Found")


class RequestError(Exception):
    """A request that is refused, or could not be answered.

    param: the field that is at fault, where one is. headers: of the answer.
    """

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers


def error_body(message: str, param: str | None = None) -> dict:
    """What an error says, cut where it repeats what a client has sent at length."""
    return {"error": {"message": message[:2000], "param": param and param[:200]}}


def log_error(where: str, status: int, message: str) -> None:
    """Write one line about a request that was not answered as asked."""
    print(f"{status} {visible(where[:200])}: {visible(message[:500])}", file=sys.stderr, flush=True)


class Service:
    """Models, the thread that computes, and the count of what it has been asked.

    rows: texts in one forward pass of the reward model. queue_size: the most responses and texts to score that may wait
    or be under way. most_tokens: the most tokens of a response.
    """

    def __init__(self, models: ServedModels, rows: int, queue_size: int, most_tokens: int):
        self.models, self.scorer, self.context = models.by_name, models.scorer, models.context
        self.queue_size, self.most_tokens = queue_size, most_tokens
        self.taken = 0
        self.open: set[Generation] = set()  # that requests wait for
        # One thread, because a TextEncoder remembers what it was asked last.
        self._texts = ThreadPoolExecutor(1, "texts")
        self._templates = ThreadPoolExecutor(1, "templates")  # of its own: a template may take seconds
        self.worker = Worker({name: model.decoder for name, model in self.models.items()}, self.scorer, rows)

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
        for generation in self.open:
            generation.fail("the service is ending, and this was not done in time")

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
            raise RequestError(404, f"there is no model {name!r} here. There is: {known}", "models")
        return self.models[name]

    async def encoded(self, encode: Callable[[], Found]) -> Found:
        """The result of `encode`, which turns texts into tokens, computed without blocking other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, encode)

    async def rendered(self, model: ServedModel, messages: list[dict]) -> str:
        """What a model's chat template makes of messages, up to where it begins the answer. Raises: RequestError."""
        rendering = functools.partial(render, model.tokenizer, messages, "messages", add_generation_prompt=True)
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
            raise RequestError(400, told)
        if self.taken + count > self.queue_size:
            told = f"{self.taken} responses or texts are waited for, and {count} more have no room. Try again"
            raise RequestError(429, told, headers={"retry-after": "1"})
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The reward model's scores of sequences of token ids; raises RequestError where they could not be computed."""
        found = await asyncio.gather(*(asyncio.wrap_future(self.worker.score(ids)) for ids in sequences))
        if not all(map(math.isfinite, found)):
            raise RequestError(500, "the reward model gives no finite score to this")
        return found


class Responses:
    """The responses that one request asks for, as they are drawn. When the context ends, unfinished ones are cancelled.

        with Responses(service, [(model, prompt_ids, settings), ...]) as responses:
            async for number, text, is_whole in responses.updates(): ...

    models, generations: in the order that they were asked for.
    """

    def __init__(self, service: Service, wanted: Sequence[tuple[ServedModel, list[int], Settings]]):
        self.service, self.models = service, [model for model, _, _ in wanted]
        self._loop, self._more = asyncio.get_running_loop(), asyncio.Event()
        self.generations = [
            Generation(prompt_ids, settings, model.ends, model.tokenizer, self._changed)
            for model, prompt_ids, settings in wanted
        ]

    def __enter__(self) -> "Responses":
        self.service.open.update(self.generations)
        for model, generation in zip(self.models, self.generations, strict=True):
            self.service.worker.generate(model.name, generation)
        return self

    def __exit__(self, *_) -> None:
        self.service.open.difference_update(self.generations)
        for generation in self.generations:
            generation.cancelled = True

    def _changed(self) -> None:
        """Called in the worker's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, with all that waited for this
            self._loop.call_soon_threadsafe(self._more.set)

    async def updates(self) -> AsyncIterator[tuple[int, str, bool]]:
        """The number of a response, what was added to its text, and whether it is whole; until all are. Raises:
        RequestError where one failed."""
        said, left = [0] * len(self.generations), dict(enumerate(self.generations))
        while left:
            await self._more.wait()
            self._more.clear()
            for number, generation in list(left.items()):
                if generation.error is not None:
                    raise RequestError(503 if generation.error != FAILED else 500, generation.error)
                is_whole = generation.reason is not None  # looked at before its pieces, which are then all there
                pieces = generation.pieces[said[number] :]
                said[number] += len(pieces)
                for piece in pieces:
                    yield number, piece, False
                if is_whole:
                    del left[number]
                    yield number, "", True


class Worker:
    """The thread that draws and scores. Requests that wait for the same model are decoded or scored together.

    One thread for all models: on a GPU they share its one queue of work, and on CPUs torch's own threads share the
    cores. A turn gives each model one token of all its responses, and the reward model one batch of at most `rows`
    sequences, so that none waits for another's whole response.
    """

    def __init__(self, decoders: Mapping[str, Decoder], scorer: ServedScorer | None, rows: int):
        self.decoders, self.scorer, self.rows = dict(decoders), scorer, rows
        self._waiting: dict[str, deque[Generation]] = {name: deque() for name in decoders}
        self._to_score: deque[tuple[Sequence[int], Future[float]]] = deque()
        self._something = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the turn under way; what has not been drawn is left."""
        with self._something:
            self._ending = True
            self._something.notify()
        self._thread.join()

    def generate(self, model: str, generation: Generation) -> None:
        """Have a response drawn."""
        with self._something:
            self._waiting[model].append(generation)
            self._something.notify()

    def score(self, ids: Sequence[int]) -> Future[float]:
        """Have a sequence of token ids scored; one whose future is cancelled is not."""
        future: Future[float] = Future()
        with self._something:
            self._to_score.append((ids, future))
            self._something.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._something:
                while not (self._ending or self._is_work()):
                    self._something.wait()
                if self._ending:
                    return
                joining = {name: self._next(name) for name in self.decoders}
                jobs = [self._to_score.popleft() for _ in range(min(self.rows, len(self._to_score)))]
            for name, decoder in self.decoders.items():
                self._turn(decoder, joining[name])
            self._score([(ids, future) for ids, future in jobs if future.set_running_or_notify_cancel()])

    def _is_work(self) -> bool:
        return bool(
            self._to_score or any(self._waiting.values()) or any(decoder.living for decoder in self.decoders.values())
        )

    def _next(self, name: str) -> list[Generation]:
        """The responses of a model that begin now, without those that nobody wants any more."""
        waiting = self._waiting[name]
        found: list[Generation] = []
        while waiting and len(found) < self.decoders[name].room:
            generation = waiting.popleft()
            if not generation.cancelled:
                found.append(generation)
        return found

    def _turn(self, decoder: Decoder, joining: list[Generation]) -> None:
        try:
            decoder.step()
            if joining:
                decoder.join(joining)
        except Exception:  # whatever it is, it must not end the service: these responses fail, others go on
            traceback.print_exc(file=sys.stderr)
            for generation in joining:
                generation.fail(FAILED)
            decoder.fail(FAILED)

    def _score(self, jobs: list[tuple[Sequence[int], Future[float]]]) -> None:
        if not jobs:
            return
        assert self.scorer is not None, "a sequence to score without a reward model"
        try:
            scores = scores_of(self.scorer, [ids for ids, _ in jobs])
        except Exception:
            traceback.print_exc(file=sys.stderr)
            for _, future in jobs:
                future.set_exception(RequestError(500, FAILED))
            return
        for (_, future), score in zip(jobs, scores, strict=True):
            future.set_result(score)


@torch.inference_mode()
def scores_of(served: ServedScorer, sequences: Sequence[Sequence[int]]) -> list[float]:
    """The score of each sequence of token ids, a prompt and its response, in one forward pass: as step 3 has it, at the
    token that the model was trained to be read at, with the stored normalisation."""
    scorer = served.scorer
    device = next(scorer.parameters()).device
    ids, mask = (tensor.to(device) for tensor in padded([list(ids) for ids in sequences], served.pad_id))
    return scorer.sequence_scores(scorer(ids, mask, position_ids(mask)), ids, mask).tolist()
