"""Writes checkpoints when they are due, while training goes on, and deletes older checkpoints.

    checkpoints = CheckpointWriter(output_dir, Schedule(steps=100), models=models.trained, state=..., config_files=...)
    ...                                             # a step has been trained
    checkpoints.save_if_due(step)                   # on all ranks, at the end of each step
    ...
    checkpoints.wait()                              # at the end of the run

All ranks call all methods together, between steps. First each rank copies its part of the state. Then a thread of each
rank writes the copy while training goes on, and the thread of rank 0 completes the checkpoint. An older checkpoint is
deleted only when a newer one is whole. Files that the program did not write are never deleted.
"""

import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from engine import distributed
from engine.atomic_files import remove_folder, sync
from engine.errors import RunStopped, UserError
from engine.host_memory import COPIES_SHARE, copies_in, host_buffer, room_of
from engine.reference import EMA
from engine.zero.accelerator import ranks_of_this_machine
from engine.zero.engines import TrainedModel
from engine.zero.training_state import Shard
from training.checkpoints.conditions import Conditions, state_file
from training.checkpoints.files import EMA as EMA_FOLDER
from training.checkpoints.files import (
    MANIFEST,
    PARTIAL,
    PRUNED,
    REFERENCE,
    STATE_FILE,
    Damage,
    FileRecord,
    Manifest,
    Schedule,
    checkpoint_folder,
    checkpoints_in,
    files_in,
    rank_file,
    set_aside,
    step_of,
    write_bytes,
    write_shards,
)
from training.runtime.environment import from_here
from training.runtime.processes import phase

LOOKING_FOR_RANKS = 0.05  # seconds between rank 0's looks for the other ranks' files


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of writing a checkpoint on one rank. problem: why writing failed; None if it did not. On rank 0 the
    outcome also says whether the whole checkpoint is complete."""

    problem: str | None = None
    whole: bool = False


class PendingPoint:
    """Writes one checkpoint in a thread. `outcome` shows whether writing has failed, or the checkpoint is whole.

    When a rank other than rank 0 has written its files, it writes a small file rank_N.json with their sizes and hashes.
    Rank 0 waits for all these files, writes the manifest from them, and renames the folder. Thus a checkpoint is
    completed without a collective call, and training does not wait for it.

    final: the path that the checkpoint's folder gets when it is whole. shards: {path of a file within the checkpoint:
    this rank's shards in it}; they must not change until they are written. texts: {path: content} of the small files
    that rank 0 writes.
    """

    def __init__(
        self, final: Path, step: int, shards: Mapping[str, list[Shard]], texts: Mapping[str, bytes], started: float
    ):
        self.final = final
        self.step = step
        self.started = started
        self.partial = final.with_name(final.name + PARTIAL)
        self.outcome = Outcome()
        self.seconds, self.size = 0.0, 0
        self.held_up: float | None = None  # seconds that training waited for the copy
        self._shards, self._texts = shards, texts
        self._rank, self._ranks = distributed.rank(), distributed.world_size()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {step}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def join(self) -> None:
        """Wait until this rank has done its part."""
        self._thread.join()

    def give_up(self) -> None:
        """Stop waiting for other ranks, and remove what was written. Called when no rank is still writing."""
        self._given_up.set()
        self._thread.join()
        if self._rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _run(self) -> None:
        try:
            files = {name: write_shards(self.partial / name, shards) for name, shards in self._shards.items()}
            if self._rank == 0:
                files |= {name: write_bytes(self.partial / name, text) for name, text in self._texts.items()}
                self._complete(files)
            else:
                self._announce(files)
        except Exception as error:  # usually an error of the disk; the run goes on after any error
            self.outcome = Outcome(problem=from_here(f"rank {self._rank}: {str(error) or type(error).__name__}"))

    def _announce(self, files: Mapping[str, FileRecord]) -> None:
        for folder in {(self.partial / name).parent for name in files}:
            sync(folder)
        path = self._announcement(self._rank)
        unfinished = path.with_suffix(".tmp")
        unfinished.unlink(missing_ok=True)
        write_bytes(unfinished, json.dumps(files).encode())
        unfinished.rename(path)

    def _announcement(self, rank: int) -> Path:
        return self.partial / f"rank_{rank:05d}.json"

    def _complete(self, files: dict[str, FileRecord]) -> None:
        for rank in range(1, self._ranks):
            path = self._announcement(rank)
            while not path.exists():
                if self._given_up.wait(LOOKING_FOR_RANKS):
                    return
            files |= {name: FileRecord(*record) for name, record in json.loads(path.read_text()).items()}
            path.unlink()
        manifest = Manifest(self.step, dict(sorted(files.items())))
        write_bytes(self.partial / MANIFEST, manifest.text().encode())
        for folder in [path for path in self.partial.rglob("*") if path.is_dir()]:
            sync(folder)
        sync(self.partial)
        self.partial.rename(self.final)
        sync(self.final.parent)
        sync(self.final.parent.parent)
        self.seconds, self.size = time.monotonic() - self.started, manifest.size
        self.outcome = Outcome(whole=True)


class HostCopy:
    """A copy of this rank's shards in host memory, which does not change when training goes on. Its buffer is allocated
    for the first checkpoint, and later checkpoints use the same buffer."""

    def __init__(self):
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def of(self, shards: Mapping[str, list[Shard]]) -> dict[str, list[Shard]] | None:
        """Copies of these shards, which overwrite the copies made before; None if a rank has no room for its copies
        (all ranks call this together). A larger buffer is allocated if necessary, unless it would take more than
        COPIES_SHARE of a rank's share of the free host memory. The buffer is pinned if shards are on a GPU."""
        values = [shard.values for found in shards.values() for shard in found]
        size, free = room_of(values), COPIES_SHARE * psutil.virtual_memory().available / ranks_of_this_machine()
        if distributed.any_rank(size > len(self.buffer) + free):  # no rank allocates before all have looked
            return None
        if size > len(self.buffer):
            self.buffer = torch.empty(0, dtype=torch.uint8)  # frees the smaller buffer
            with contextlib.suppress(RuntimeError):  # a limit of the system is smaller
                self.buffer = host_buffer(values)
        if distributed.any_rank(size > len(self.buffer)):
            return None
        copies = iter(copies_in(self.buffer, values))
        return {name: [replace(shard, values=next(copies)) for shard in found] for name, found in shards.items()}


def prune(output_dir: Path, keep: int, best: int | None, say: Callable[[str], None]) -> None:
    """Delete all checkpoints except the newest `keep` checkpoints and that of step `best` (rank 0 does). With keep = 0
    nothing is deleted.

    A folder with files that its manifest does not name is not deleted. A checkpoint is renamed before it is deleted; if
    the run is killed while deleting, no incomplete checkpoint has a valid name.
    """
    if not keep:
        return
    for checkpoint in checkpoints_in(output_dir)[:-keep]:
        if step_of(checkpoint) == best:
            continue
        try:
            if _is_ours(checkpoint):
                going = checkpoint.with_name(checkpoint.name + PRUNED)
                remove_folder(going)
                remove_folder(checkpoint.rename(going))
        except OSError as error:
            say(f"the older checkpoint {checkpoint} could not be deleted: {error}. It may be deleted by hand.")


def _is_ours(checkpoint: Path) -> bool:
    try:
        return not checkpoint.is_symlink() and files_in(checkpoint) == {MANIFEST, *Manifest.read(checkpoint).files}
    except (Damage, UserError):
        return False


RETRY_AFTER = 60.0  # seconds from a failed write to the next try
LOOKING = 0.02  # seconds between two looks while the run waits for a checkpoint to be complete


class CheckpointWriter:
    """Writes a run's checkpoints.

    Args:
        schedule: when checkpoints are written, and which are kept.
        models: {name of the model's folder within a checkpoint: trained model}.
        state: function that returns the current state of the training loop as JSON values, without models and EMA.
        conditions: the settings under which the run trains.
        config_files: {path: content} of the files under config/ (training/checkpoints/files.py).
        ema: the moving average of the actor; None if the run keeps none.
        reference: the weights of a reference that is refreshed (`MovingReference.kept`); None for other references.
        resumed: the checkpoint from which the run was resumed, if any.
        scores: {step: held-out score} of existing checkpoints; larger is better.
        say: function that prints a line on the main rank.
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
        self.models = models
        self.ema = ema
        self.state = state
        self.conditions = conditions
        self.averages = {name: kept for name, kept in ((EMA_FOLDER, ema), (REFERENCE, reference)) if kept is not None}
        self.config_files = dict(config_files or {})
        self.newest: Path | None = resumed
        """The newest checkpoint that is known to be whole."""
        self.scores = dict(scores or {})
        self.say = say
        self.problem: str | None = None  # why the latest checkpoint that failed was not written
        self._pending: PendingPoint | None = None
        self._metrics: dict[str, float] = {}
        self._copy = HostCopy()
        self._last_saved = self._clock()
        self._retry_at: float | None = None
        self._pruning: threading.Thread | None = None

    def save_if_due(self, step: int, score: float | None = None) -> None:
        """Check the outcome of the previous checkpoint, and write a checkpoint of this step if one is due.

        score: the held-out score after this step, if it was measured; larger is better.
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
        now = self._clock()  # all ranks use rank 0's clock
        if self._retry_at is not None and now >= self._retry_at:
            return True
        return bool(self.schedule.minutes) and now - self._last_saved >= 60 * self.schedule.minutes

    @staticmethod
    def _clock() -> float:
        return distributed.broadcast_object(time.monotonic())

    @phase("writing a checkpoint")
    def save(self, step: int, wait: bool = False) -> Path | None:
        """Write the current weights and `state` as the checkpoint of this step, unless it exists already. Returns its
        folder, or None if it cannot be written.

        wait: whether to return only when the checkpoint is whole or has failed. This is also done if host memory has no
            room for a copy.
        """
        self.wait()
        final = checkpoint_folder(self.output_dir, step)
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
        wait = wait or not self.schedule.asynchronous
        copies = None if wait else self._copy.of(shards)
        if copies is None and not wait and distributed.is_main():
            self.say(f"step {step}: training waits for its checkpoint, as host memory has no room for a copy of it")
        self._pending = PendingPoint(final, step, copies or shards, texts, time.monotonic())
        self._pending.start()
        self._last_saved, self._retry_at = self._clock(), None
        if copies is None:
            self.wait()
        else:
            self._pending.held_up = time.perf_counter() - started
        self._metrics["time/checkpoint"] = time.perf_counter() - started
        return final if self._pending is not None or self.newest == final else None

    def _shards(self) -> dict[str, list[Shard]]:
        found = {name: model.shards() for name, model in self.models.items()}
        return found | {name: average.shards() for name, average in self.averages.items()}

    def _prepare(self, final: Path) -> str | None:
        """Make the folder into which a checkpoint is written. Returns the reason if this fails, else None."""
        partial = final.with_name(final.name + PARTIAL)
        try:
            remove_folder(partial)
            partial.mkdir(parents=True)
            if os.path.lexists(final):  # an abandoned or damaged checkpoint
                set_aside(final)
        except OSError as error:
            return f"rank 0: {error}"
        return None

    def _look(self, wait: bool = False) -> None:
        """Check on all ranks whether the checkpoint that is being written is whole or has failed. wait: whether to wait
        until it is."""
        while self._pending is not None:
            outcomes = distributed.all_gather_objects(self._pending.outcome)
            problems = [outcome.problem for outcome in outcomes if outcome.problem is not None]
            if problems:
                pending, self._pending = self._pending, None
                if not distributed.is_main():
                    pending.join()
                distributed.barrier()  # after this, no rank writes into the folder any more
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
            waited = "" if pending.held_up is None else f"; training waited {pending.held_up:.2f} s"
            self.say(f"checkpoint {pending.final}: {_amount(size)} in {seconds:.2f} s{waited}")
        self._prune()

    def _prune(self) -> None:
        """Delete older checkpoints in a thread, while training goes on (rank 0 does)."""
        if distributed.is_main() and self.schedule.keep:
            if self._pruning is not None:
                self._pruning.join()
            given = (self.output_dir, self.schedule.keep, self.best_step(), self.say)
            self._pruning = threading.Thread(target=prune, args=given, daemon=True)
            self._pruning.start()

    def best_step(self) -> int | None:
        """The step of the best checkpoint that is there; None if none was measured, or the best is not kept."""
        if not self.schedule.keep_best or not self.scores:
            return None
        there = {
            step: score for step, score in self.scores.items() if checkpoint_folder(self.output_dir, step).is_dir()
        }
        return max(there, key=lambda step: (there[step], step), default=None)

    def _failed(self, step: int, problem: str) -> None:
        self.problem, self._retry_at = problem, self._clock() + RETRY_AFTER
        if distributed.is_main():
            there = self.newest is not None and self.newest.is_dir()  # False if somebody has deleted it
            older = f"{self.newest} is untouched" if there else "there is none before it"
            self.say(
                f"CHECKPOINT NOT WRITTEN, of step {step}: {problem}. The run goes on, and tries again after a step "
                f"in {RETRY_AFTER:.0f} s or more; {older}."
            )

    @phase("writing a checkpoint")
    def wait(self) -> None:
        """Wait until the checkpoint that is being written is whole or has failed, and older checkpoints are deleted."""
        self._look(wait=True)
        self._prune()  # a new held-out score may have changed which checkpoint is the best
        if self._pruning is not None:
            self._pruning.join()

    def take_metrics(self) -> dict[str, float]:
        """The metrics of the checkpoints written since the last call: time/checkpoint, checkpoint/seconds,
        checkpoint/bytes."""
        found, self._metrics = self._metrics, {}
        return found


def _amount(size: int) -> str:
    """A number of bytes as a text with a unit."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


@contextlib.contextmanager
def last_good_named(checkpoints: CheckpointWriter, weights_of: Callable[[], int | None]) -> Iterator[None]:
    """If all ranks raise RunStopped within this block, add the checkpoint from which the run can be resumed to its
    message.

    If the current weights are sound and belong to a finished step, they are first saved in a checkpoint, unless it
    exists. The message names the newest sound checkpoint, or says that there is none.

    weights_of: function that returns the number of the step that made the current weights, or None in the middle of an
    update.
    """
    try:
        yield
    except RunStopped as stop:
        if stop.good_until is None:
            raise
        step = weights_of() if stop.good_until == math.inf else None
        saved = checkpoints.save(step, wait=True) if step else None
        checkpoints.wait()
        if saved is not None:
            ending = f"The state after step {step} is saved: go on from it with --resume {saved}."
        else:
            ending = last_good(checkpoints.output_dir, stop.good_until)
        raise RunStopped(f"{stop}\n{ending}") from None


def last_good(output_dir: Path, good_until: float) -> str:
    """Text that names the newest checkpoint that is not after the step `good_until`, and warns of the checkpoints after
    it."""
    steps = {
        step_of(checkpoint) or 0: checkpoint
        for checkpoint in checkpoints_in(output_dir)
        if (checkpoint / MANIFEST).is_file()
    }
    good = [step for step in steps if step <= good_until]
    spoilt = [steps[step].name for step in sorted(steps) if step > good_until]
    later = f" {', '.join(spoilt)} came after it: do not go on from there." if spoilt else ""
    if not good:
        return f"There is no checkpoint of a sound step in {output_dir}: --save_steps N writes them.{later}"
    checkpoint = steps[max(good)]
    return f"The last good checkpoint is {checkpoint}: go on from it with --resume {checkpoint}.{later}"
