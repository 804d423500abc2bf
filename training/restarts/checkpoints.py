"""Restart points as a training loop writes them: when one is due, written beside training, the older ones pruned.

    checkpoints = Checkpoints(output_dir, Schedule(steps=100), models=models.trained, state=..., config_files=...)
    ...                                             # a step has been trained
    checkpoints.save_if_due(step)                   # on all ranks, at each step's end
    ...
    checkpoints.wait()                              # at the end of the run

All ranks call all methods together, between steps.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from engine import distributed
from engine.ema import EMA
from engine.whole_files import remove_folder
from engine.zero.engines import TrainedModel
from engine.zero.shards import Shard
from training.program.phases import phase
from training.restarts.conditions import Conditions, state_file
from training.restarts.layout import EMA as EMA_FOLDER
from training.restarts.layout import PARTIAL, REFERENCE, STATE_FILE, point_folder, rank_file, set_aside
from training.restarts.pending_point import PendingPoint, copied
from training.restarts.pruning import prune
from training.restarts.schedule import Schedule

RETRY_AFTER = 60.0  # seconds after a failed write
LOOKING = 0.02  # seconds between looks while the run waits for a point


class Checkpoints:
    """Writes a run's restart points.

    Args:
        models: those that train, by the names of their folders within a point.
        state: () -> what of the run is to be gone on with beside models and EMA, as of now; for JSON.
        conditions: under which the run trains.
        reference: the weights of a reference that is refreshed (`MovingReference.kept`).
        config_files: what stands under config/, by path; see `training.restarts.config_files`.
        resumed: the point that the run went on from, if any.
        scores: held-out scores of points that are there already, by step; larger is better.
        say: prints a line on the main rank.
    """

    def __init__(
        self,
        output_dir: Path,
        schedule: Schedule,
        *,
        models: Mapping[str, TrainedModel],
        state: Callable[[], Mapping],
        conditions: Conditions,
        config_files: Mapping[str, bytes] | None = None,
        ema: EMA | None = None,
        reference: EMA | None = None,
        resumed: Path | None = None,
        scores: Mapping[int, float] | None = None,
        say: Callable[[str], None] = print,
    ):
        self.output_dir, self.schedule = output_dir, schedule
        self.models, self.ema, self.state, self.conditions = models, ema, state, conditions
        self.averages = {name: kept for name, kept in ((EMA_FOLDER, ema), (REFERENCE, reference)) if kept is not None}
        self.config_files = dict(config_files or {})
        self.newest: Path | None = resumed
        """The newest point that is known to be whole."""
        self.scores = dict(scores or {})
        self.say = say
        self._pending: PendingPoint | None = None
        self._metrics: dict[str, float] = {}
        self._held_up = 0.0
        self._last_saved = self._clock()
        self._retry_at: float | None = None
        self._pruning: threading.Thread | None = None

    def save_if_due(self, step: int, score: float | None = None) -> None:
        """Write a point after this step if it is time to; and look what became of the one before.

        score: of the held-out data, where they were looked at after this step; larger is better.
        """
        best = score is not None and score > max(self.scores.values(), default=float("-inf"))
        if score is not None:
            self.scores[step] = score
        self._look()
        if self._is_due(step) or (best and self.schedule.keep_best):
            self.save(step)

    def _is_due(self, step: int) -> bool:
        if self.schedule.steps and step % self.schedule.steps == 0:
            return True
        if not self.schedule.minutes and self._retry_at is None:
            return False
        now = self._clock()  # rank 0's, for all
        if self._retry_at is not None and now >= self._retry_at:
            return True
        return bool(self.schedule.minutes) and now - self._last_saved >= 60 * self.schedule.minutes

    @staticmethod
    def _clock() -> float:
        return distributed.broadcast_object(time.monotonic())

    @phase("writing a restart point")
    def save(self, step: int, wait: bool = False) -> Path | None:
        """Write the point of this step, unless it is there; returns its folder, or None where it cannot be written.

        The weights and `state` are those of now. wait: until it is whole, or has failed.
        """
        self.wait()
        final = point_folder(self.output_dir, step)
        if self.newest is not None and self.newest.resolve() == final.resolve():
            return self.newest
        started = time.perf_counter()
        problem = distributed.broadcast_object(self._prepare(final) if distributed.is_main() else None)
        if problem is not None:
            self._failed(step, problem)
            return None
        shards = {f"{name}/{rank_file(distributed.rank())}": found for name, found in self._shards().items()}
        texts = {f"config/{name}": data for name, data in self.config_files.items()}
        scalars = {name: model.scalars() for name, model in self.models.items()}
        texts[STATE_FILE] = state_file(self.state(), scalars, self.conditions, self.ema is not None).encode()
        if self.schedule.asynchronous:
            shards = {name: copied(found) for name, found in shards.items()}
        self._pending = PendingPoint(final, step, shards, texts, time.monotonic())
        self._pending.start()
        self._last_saved, self._retry_at = self._clock(), None
        if wait or not self.schedule.asynchronous:
            self.wait()
        self._held_up = self._metrics["time/checkpoint"] = time.perf_counter() - started
        return final if self._pending is not None or self.newest == final else None

    def _shards(self) -> dict[str, list[Shard]]:
        found = {name: model.shards() for name, model in self.models.items()}
        return found | {name: average.shards() for name, average in self.averages.items()}

    def _prepare(self, final: Path) -> str | None:
        """Make the folder that a point is written into; returns why that cannot be done."""
        partial = final.with_name(final.name + PARTIAL)
        try:
            remove_folder(partial)
            partial.mkdir(parents=True)
            if os.path.lexists(final):  # of another course of the run, or damaged
                set_aside(final)
        except OSError as error:
            return f"rank 0: {error}"
        return None

    def _look(self, wait: bool = False) -> None:
        """See on all ranks whether the point under way is whole or has failed; or wait until it is one of both."""
        while self._pending is not None:
            outcomes = distributed.all_gather_objects(self._pending.outcome)
            problems = [outcome.problem for outcome in outcomes if outcome.problem is not None]
            if problems:
                pending, self._pending = self._pending, None
                if not distributed.is_main():
                    pending.join()
                distributed.barrier()  # nobody writes into the folder any more
                if distributed.is_main():
                    pending.give_up()
                self._failed(pending.step, problems[0])
            elif outcomes[0].whole:
                self._written()
            elif not wait:
                return
            else:
                time.sleep(LOOKING)

    def _written(self) -> None:
        pending, self._pending = self._pending, None
        pending.join()
        self.newest = pending.final
        if distributed.is_main():
            seconds, size = max(pending.seconds, 1e-9), pending.size
            self._metrics |= {"checkpoint/seconds": seconds, "checkpoint/bytes": float(size)}
            waited = f"; training waited {self._held_up:.2f} s" if self.schedule.asynchronous else ""
            self.say(f"restart point {pending.final}: {_amount(size)} in {seconds:.2f} s{waited}")
        self._prune()

    def _prune(self) -> None:
        """Delete older points beside training (rank 0 does)."""
        if distributed.is_main() and self.schedule.keep:
            if self._pruning is not None:
                self._pruning.join()
            given = (self.output_dir, self.schedule.keep, self._best_step(), self.say)
            self._pruning = threading.Thread(target=prune, args=given, daemon=True)
            self._pruning.start()

    def _best_step(self) -> int | None:
        if not self.schedule.keep_best or not self.scores:
            return None
        there = {step: score for step, score in self.scores.items() if point_folder(self.output_dir, step).is_dir()}
        return max(there, key=lambda step: (there[step], step), default=None)

    def _failed(self, step: int, problem: str) -> None:
        self._retry_at = self._clock() + RETRY_AFTER
        if distributed.is_main():
            there = self.newest is not None and self.newest.is_dir()  # not where somebody has deleted it
            older = f"{self.newest} is untouched" if there else "there is none before it"
            self.say(
                f"RESTART POINT NOT WRITTEN, of step {step}: {problem}. The run goes on, and tries again after a step "
                f"in {RETRY_AFTER:.0f} s or more; {older}."
            )

    @phase("writing a restart point")
    def wait(self) -> None:
        """Wait until the point under way is whole, or has failed, and the older ones are pruned."""
        self._look(wait=True)
        self._prune()  # a held-out score may have come since
        if self._pruning is not None:
            self._pruning.join()

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call: time/checkpoint, checkpoint/seconds, checkpoint/bytes."""
        found, self._metrics = self._metrics, {}
        return found


def _amount(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
