"""Whether all ranks see what rank 0 writes under --output_dir: models and restart points need one folder for all."""

import contextlib
import os
import socket
import tempfile
import time
from pathlib import Path

from engine import distributed
from training.program.agreement import SharedError

PATIENCE = 10.0  # seconds that a network folder may take to show a new file


def check_shared(output_dir: str) -> None:
    """Raise UserError on all ranks where one does not see a file that rank 0 has just written (all ranks call this).

    The file stands in the nearest folder above that is there already, so that none is made for a run that comes to
    nothing. The check of the folder itself has been made: something can be written there.
    """
    if distributed.world_size() == 1:
        return
    folder = Path(output_dir).absolute()
    nearest = next(part for part in (folder, *folder.parents) if part.exists())
    with contextlib.ExitStack() as stack:
        place = None
        if distributed.is_main():
            place = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".seen_by_all_ranks_", dir=nearest)).name
        place = distributed.broadcast_object(place)
        seen = distributed.all_gather_objects(None if _seen(Path(place)) else socket.gethostname())
    writer = distributed.broadcast_object(socket.gethostname())
    blind = [f"rank {rank} on {host}" for rank, host in enumerate(seen) if host is not None]
    if blind:
        raise SharedError(
            f"--output_dir {output_dir}: {', '.join(blind[:4])}{' and others' if blind[4:] else ''} cannot see what "
            f"rank 0 on {writer} writes in {nearest}. Models and restart points need a folder that all nodes share: "
            "give one on a network file system, mounted at the same path on all of them."
        )


def _seen(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not os.path.lexists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
