"""Whether all ranks see what rank 0 writes under --output_dir: models and restart points need one folder for all."""

import socket
import tempfile
import time
from pathlib import Path

from engine import distributed
from engine.errors import SharedError
from training.program import output_lock
from training.program.output_lock import LOCK_FILE
from training.program.unwritten import reason_of

PATIENCE = 35.0  # seconds; NFS believes for 30 (acdirmin) what it last saw of a folder
INTERVAL = 0.1  # seconds between two looks
SHOWN = 4  # hosts that a message names


def check_shared(output_dir: str) -> None:
    """Raise UserError on all ranks where one does not see rank 0's run.lock, or cannot write beside it (all call this).

    Each rank looks where it would write its part of a restart point. The lock is the file to look for: rank 0 has just
    written it, and what stands in it is no other run's. What ranks need not share is not looked at: rank 0 alone writes
    models, metrics and TensorBoard's files, each node may have a cache of its own, and NVMe folders are local.
    """
    if distributed.world_size() == 1:
        return
    folder = Path(output_dir).absolute()
    token = distributed.broadcast_object(output_lock.token() if distributed.is_main() else None)
    found = distributed.all_gather_objects((socket.gethostname(), str(folder), _problem(folder, token)))
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, (host, own, problem) in enumerate(found):
        if problem:
            ranks.setdefault((host, own, problem), []).append(rank)
    if ranks:
        (writer, written, _), told = found[0], [_told(*where, numbers) for where, numbers in ranks.items()]
        more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        raise SharedError(
            f"--output_dir {output_dir} is not one folder for all ranks. Rank 0 on {writer} writes in {written}; "
            f"{'; '.join(told[:SHOWN])}{more}. Models and restart points need a folder that all nodes share: give one "
            "on a network file system, mounted at the same path on all of them and writable on each."
        )


def _problem(folder: Path, token: str) -> str:
    """What keeps this rank from sharing rank 0's folder; empty if nothing does."""
    deadline = time.monotonic() + PATIENCE
    while output_lock.read(folder / LOCK_FILE).get("token") != token:
        if time.monotonic() > deadline:
            return "does not see that"
        time.sleep(INTERVAL)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot write there ({reason_of(error)})"
    return ""


def _told(host: str, folder: str, problem: str, ranks: list[int]) -> str:
    """ "node-b (ranks 8 to 15), which looks in /out, does not see that"."""
    numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"
    return f"{host} ({numbers}), which looks in {folder}, {problem}"
