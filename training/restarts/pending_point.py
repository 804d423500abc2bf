"""A restart point on its way to the disk: what each rank's thread writes of it, and how rank 0's makes it whole."""

import json
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine import distributed
from engine.whole_files import sync
from engine.zero.shards import Shard
from training.program.joining import from_here
from training.restarts.layout import MANIFEST, PARTIAL
from training.restarts.manifest import Manifest
from training.restarts.shard_files import FileRecord, write_bytes, write_shards

LOOKING = 0.05  # seconds between rank 0's looks for what the others have written


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank knows of a point's writing: why it cannot come to an end here, and whether (rank 0) it is whole."""

    problem: str | None = None
    whole: bool = False


class PendingPoint:
    """Writes one restart point in a thread of its own; `outcome` is what has come of it so far.

    A rank that has written its files says so by a small file beside them, rank_N.json, with their sizes and hashes.
    Rank 0 waits for all of these, writes the manifest from them and renames the folder. So a point becomes whole
    without a collective call, and training does not wait for it.

    final: the folder it will be. shards: this rank's, by the path of their file within the point; they are not to
    change until it is written. texts: small files that rank 0 writes, by their paths.
    """

    def __init__(
        self, final: Path, step: int, shards: Mapping[str, list[Shard]], texts: Mapping[str, bytes], started: float
    ):
        self.final, self.step, self.started = final, step, started
        self.partial = final.with_name(final.name + PARTIAL)
        self.outcome = Outcome()
        self.seconds, self.size = 0.0, 0
        self._shards, self._texts = shards, texts
        self._rank, self._ranks = distributed.rank(), distributed.world_size()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"restart point {step}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def join(self) -> None:
        """Wait until this rank's part is done."""
        self._thread.join()

    def give_up(self) -> None:
        """Stop waiting for other ranks, and take away what was written (all ranks have ended their part, or will not
        end it)."""
        self._given_up.set()
        self._thread.join()
        if self._rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _run(self) -> None:
        try:
            files = {name: write_shards(self.partial / name, shards) for name, shards in self._shards.items()}
            if self._rank == 0:
                files |= {name: write_bytes(self.partial / name, text) for name, text in self._texts.items()}
            self._shards = {}  # the copies' memory is free again
            if self._rank == 0:
                self._complete(files)
            else:
                self._announce(files)
        except Exception as error:  # of the disk above all; whatever it is, the run goes on
            self.outcome = Outcome(problem=from_here(f"rank {self._rank}: {error or type(error).__name__}"))

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
                if self._given_up.wait(LOOKING):
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


def copied(shards: list[Shard]) -> list[Shard]:
    """Shards whose values stand in host memory and do not change with the live state."""
    held = [replace(shard, values=_in_host_memory(shard.values)) for shard in shards]
    if any(shard.values.is_cuda for shard in shards):
        torch.cuda.synchronize()
    return held


def _in_host_memory(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return values.detach().clone()
    held = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return held.copy_(values.detach(), non_blocking=values.is_cuda)
