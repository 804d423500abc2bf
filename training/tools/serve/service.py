"""Computes responses and scores for requests: one thread computes all of them, and their number is limited.

with service.admitted(1), Responses(service, [(model, prompt_ids, settings)]) as responses:
    async for number, text, is_whole in responses.updates(): ...
(response,) = responses.generations
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
from engine.files import rust_panics
from training.data.chat import render
from training.data.tokens import padded
from training.reporting.sample_tables import visible
from training.tools.serve.decoder import Decoder, Generation, Settings
from training.tools.serve.models import ServedModel, ServedModels, ServedScorer

FAILED = "the service could not compute this; the log of the service says why"
Found = TypeVar("Found")


class RequestError(Exception):
    """Raised if a request is refused, or could not be answered.

    status: HTTP status of the answer. param: the request's field with the mistake, if there is one. headers: HTTP
    headers of the answer.
    """

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers


def error_body(message: str, param: str | None = None) -> dict:
    """The JSON object that answers a request with an error. Long messages are cut, since they may repeat what the
    client has sent."""
    return {"error": {"message": message[:2000], "param": param and param[:200]}}


def log_error(where: str, status: int, message: str) -> None:
    """Write one line to the log about a request that failed or was refused."""
    print(f"{status} {visible(where[:200])}: {visible(message[:500])}", file=sys.stderr, flush=True)


class Service:
    """Holds the models and the thread that computes, and counts the requested responses and scores.

    rows: number of texts in one forward pass of the reward model. queue_size: largest number of responses and texts to
    score that may wait or be computed at a time. most_tokens: largest number of tokens of a response.
    """

    def __init__(self, models: ServedModels, rows: int, queue_size: int, most_tokens: int):
        self.models, self.scorer, self.context = models.by_name, models.scorer, models.context
        self.queue_size, self.most_tokens = queue_size, most_tokens
        self.taken = 0
        self.open: set[Generation] = set()  # the responses that requests wait for
        # One thread only, because a TextEncoder caches its last results.
        self._texts = ThreadPoolExecutor(1, "texts")
        self.worker = Worker({name: model.decoder for name, model in self.models.items()}, self.scorer, rows)

    def start(self) -> None:
        """Start the thread that computes."""
        self.worker.start()

    def stop(self) -> None:
        """Stop the thread that computes. Responses that are being drawn stay unfinished."""
        self.worker.stop()
        self._texts.shutdown()

    def abort(self) -> None:
        """End all unfinished responses with an error. The requests for them are answered with this error."""
        for generation in self.open:
            generation.fail("the service is ending, and this was not done in time")

    def state(self) -> dict:
        """The answer to GET /health: the models, which of them have a chat template, how many responses and scores are
        requested at present, how many responses are being decoded, and how many tokens were drawn so far."""
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
        """Call `encode` in another thread, so that it does not block other requests; returns its result. encode:
        function that turns texts into tokens. Raises: RequestError if the tokenizer fails at a text."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._texts, rust_panics()(encode))
        except UserError as error:
            raise RequestError(400, str(error)) from None

    async def rendered(self, model: ServedModel, messages: list[dict]) -> str:
        """The prompt that a model's chat template makes of messages, with the beginning of the answer's turn. Raises:
        RequestError."""
        rendering = functools.partial(render, model.tokenizer, messages, "messages", add_generation_prompt=True)
        try:
            return await self.encoded(rendering)
        except UserError as error:
            raise RequestError(400, str(error), "messages") from None

    @contextlib.contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Within this block, a request for `count` responses or scores counts against queue_size. Raises: RequestError
        if `count`, alone or together with other requests, exceeds queue_size."""
        if count > self.queue_size:
            told = f"{count} responses or texts in one request; at most {self.queue_size} are taken (--queue_size)"
            raise RequestError(400, told)
        if self.taken + count > self.queue_size:
            told = f"the queue has {self.taken} responses or texts, and no room for {count} more. Try again"
            raise RequestError(429, told, headers={"retry-after": "1"})
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The reward model's scores of sequences of token ids. Raises: RequestError if they cannot be computed or are
        not finite."""
        found = await asyncio.gather(*(asyncio.wrap_future(self.worker.score(ids)) for ids in sequences))
        if not all(map(math.isfinite, found)):
            raise RequestError(500, "the reward model's score is not finite")
        return found


class Responses:
    """The responses of one request, while they are being drawn. At the end of the `with` block, unfinished responses
    are cancelled.

        with Responses(service, [(model, prompt_ids, settings), ...]) as responses:
            async for number, text, is_whole in responses.updates(): ...

    models, generations: in the order of `wanted`.
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
        """Note that a response has changed (called in the worker's thread)."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits any more
            self._loop.call_soon_threadsafe(self._more.set)

    async def updates(self) -> AsyncIterator[tuple[int, str, bool]]:
        """Yields (number of a response, its additional text, whether it is complete) until all responses are complete.
        Raises: RequestError if a response failed."""
        said, left = [0] * len(self.generations), dict(enumerate(self.generations))
        while left:
            await self._more.wait()
            self._more.clear()
            for number, generation in list(left.items()):
                if generation.error is not None:
                    raise RequestError(503 if generation.error != FAILED else 500, generation.error)
                is_whole = (
                    generation.reason is not None
                )  # must be read before the pieces: if it is set, the pieces are complete
                pieces = generation.pieces[said[number] :]
                said[number] += len(pieces)
                for piece in pieces:
                    yield number, piece, False
                if is_whole:
                    del left[number]
                    yield number, "", True


class Worker:
    """The thread that draws responses and scores texts. Responses of the same model are decoded in one batch, and texts
    are scored in batches.

    All models share one thread: on a GPU they would share one queue of work anyway, and on CPUs torch's own threads
    share the cores. In one turn each model draws one token of each of its responses, and the reward model scores a
    batch of at most `rows` sequences. Therefore no request has to wait for the whole response of another request.
    """

    def __init__(self, decoders: Mapping[str, Decoder], scorer: ServedScorer | None, rows: int):
        self.decoders, self.scorer, self.rows = dict(decoders), scorer, rows
        self._waiting: dict[str, deque[Generation]] = {name: deque() for name in decoders}
        self._to_score: deque[tuple[Sequence[int], Future[float]]] = deque()
        self._something = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current turn. Unfinished responses stay unfinished."""
        with self._something:
            self._ending = True
            self._something.notify()
        self._thread.join()

    def generate(self, model: str, generation: Generation) -> None:
        """Queue a response of this model."""
        with self._something:
            self._waiting[model].append(generation)
            self._something.notify()

    def score(self, ids: Sequence[int]) -> Future[float]:
        """Queue a sequence of token ids to be scored; returns a future of the score, which may be cancelled."""
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
        """Take the waiting responses that can join a model's batch now. Cancelled responses are dropped."""
        waiting = self._waiting[name]
        found: list[Generation] = []
        while waiting and len(found) < self.decoders[name].room:
            generation = waiting.popleft()
            if not generation.cancelled:
                found.append(generation)
        return found

    def _turn(self, decoder: Decoder, joining: list[Generation]) -> None:
        try:
            with rust_panics():
                decoder.step()
                if joining:
                    decoder.join(joining)
        except Exception:  # no error may end the service: only these responses fail
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
    """The score of each sequence of token ids (a prompt and its response), computed in one forward pass. As in step 3,
    the score is read at the token at which the reward model was trained to give it, and includes the normalisation that
    is stored with the model."""
    scorer = served.scorer
    device = next(scorer.parameters()).device
    ids, mask = (tensor.to(device) for tensor in padded([list(ids) for ids in sequences], served.pad_id))
    return scorer.sequence_scores(scorer(ids, mask, position_ids(mask)), ids, mask).tolist()
