"""Run by ranks: the look at the output folder, where all see rank 0's and where rank 1 has another one."""

import errno
import tempfile
import threading
from pathlib import Path
from unittest import mock

from engine import distributed
from engine.errors import UserError
from training.runtime import output_folder


def looked(folder: str) -> dict[str, tuple[str | None, list[str]]]:
    """By case: what is raised, and what then stands in this rank's folder."""
    root, found = Path(folder), {}
    own = root / str(distributed.rank())
    found["shared"] = _raised(root / "shared")
    # A network folder that shows after a while what another host has written.
    late = root / "late" if distributed.is_main() else root / "seen late"
    if not distributed.is_main():
        threading.Timer(0.5, lambda: late.symlink_to(root / "late")).start()
    found["late"] = _raised(late)
    output_folder.PATIENCE = 0.3
    found["apart"] = _raised(own / "new")
    if not distributed.is_main():  # what another run has left on this disk
        output_folder.take_lock(own)
    found["with another's lock"] = _raised(own)
    output_folder.release_lock()
    full = OSError(errno.EROFS, "Read-only file system")
    refused = mock.patch.object(tempfile, "TemporaryFile", side_effect=None if distributed.is_main() else full)
    with refused:
        found["read-only"] = _raised(root / "shared")
    return found


def _raised(folder: Path) -> tuple[str | None, list[str]]:
    if distributed.is_main():
        output_folder.take_lock(folder)
    raised = None
    try:
        output_folder.check_shared(str(folder))
    except UserError as error:
        raised = str(error)
    left = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    distributed.barrier()
    if distributed.is_main():
        output_folder.release_lock()
    distributed.barrier()
    return raised, left
