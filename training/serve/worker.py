"""The thread that draws and scores: what waits for a model when it has room is decoded and scored together.

One thread for all models: on a GPU they share its one queue of work, and on CPUs torch's own threads share the cores. A
turn gives each model one token of all its responses, and the reward model one batch, so that none waits for another's
whole response.
"""

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from training.serve.decoder import Decoder
from training.serve.generation import Generation

FAILED = "the service could not compute this; its own log says why"


class ScoreJob:
    """A sequence of token ids that waits for its score.

    tell: is called with the score, or None where it could not be computed. cancelled: nobody wants it any more.
    """

    def __init__(self, ids: Sequence[int], tell: Callable[[float | None], None]):
        self.ids, self.tell, self.cancelled = ids, tell, False


class Worker:
    """Decodes with several models and scores with one, in a thread of its own.

    score: gives the scores of sequences of token ids, asked in one call for at most `rows` of them; None without a
    reward model.
    """

    def __init__(
        self,
        decoders: Mapping[str, Decoder],
        score: Callable[[Sequence[Sequence[int]]], list[float]] | None,
        rows: int,
    ):
        self.decoders, self.score, self.rows = dict(decoders), score, rows
        self._waiting: dict[str, deque[Generation]] = {name: deque() for name in decoders}
        self._to_score: deque[ScoreJob] = deque()
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

    def give_score(self, job: ScoreJob) -> None:
        """Have a sequence scored."""
        with self._something:
            self._to_score.append(job)
            self._something.notify()

    def _run(self) -> None:
        while True:
            with self._something:
                while not (self._ending or self._is_work()):
                    self._something.wait()
                if self._ending:
                    return
                joining = {name: self._next(name) for name in self.decoders}
                jobs = self._next_jobs()
            for name, decoder in self.decoders.items():
                self._turn(decoder, joining[name])
            self._score(jobs)

    def _is_work(self) -> bool:
        return bool(
            self._to_score or any(self._waiting.values()) or any(decoder.living for decoder in self.decoders.values())
        )

    def _next(self, name: str) -> list[Generation]:
        """The responses of a model that begin now, without those that nobody wants any more."""
        waiting, found = self._waiting[name], []
        while waiting and len(found) < self.decoders[name].room:
            generation = waiting.popleft()
            if not generation.cancelled:
                found.append(generation)
        return found

    def _next_jobs(self) -> list[ScoreJob]:
        found = []
        while self._to_score and len(found) < self.rows:
            job = self._to_score.popleft()
            if not job.cancelled:
                found.append(job)
        return found

    def _turn(self, decoder: Decoder, joining: list[Generation]) -> None:
        try:
            decoder.step()
            if joining:
                decoder.join(joining)
        except Exception:  # whatever it is, it must not end the service: these responses fail, others go on
            _log()
            for generation in joining:
                generation.fail(FAILED)
            decoder.fail(FAILED)

    def _score(self, jobs: list[ScoreJob]) -> None:
        if not jobs:
            return
        assert self.score is not None, "a job without a reward model"
        try:
            scores: Sequence[float | None] = self.score([job.ids for job in jobs])
        except Exception:
            _log()
            scores = [None] * len(jobs)
        for job, score in zip(jobs, scores, strict=True):
            job.tell(score)


def _log() -> None:
    traceback.print_exc(file=sys.stderr)
