"""Ranks that do not share one output folder are told of before anything is loaded."""

import errno
import socket
import tempfile
import threading
from pathlib import Path
from unittest import mock

from engine import distributed
from engine.errors import UserError
from scripts.harness.ranks import run_ranks
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


def test_a_rank_that_does_not_share_the_folder_is_named_on_all(tmp_path):
    host = socket.gethostname()

    def message(written, looks_in, problem):
        return (
            f"--output_dir {{given}} is not one folder for all ranks. Rank 0 on {host} writes in {written}; {host} "
            f"(rank 1), which looks in {looks_in}, {problem}. Models and restart points need a folder that all nodes "
            "share: give one on a network file system, mounted at the same path on all of them and writable on each."
        )

    one, two = tmp_path / "0", tmp_path / "1"
    for rank, found in enumerate(run_ranks("tests.distributed.test_shared_folder:looked", folder=str(tmp_path))):
        own = tmp_path / str(rank)
        assert found["shared"] == found["late"] == (None, ["run.lock"])
        raised, left = found["apart"]
        assert raised == message(one / "new", two / "new", "does not see that").format(given=own / "new")
        assert left == (["run.lock"] if rank == 0 else [])
        raised, left = found["with another's lock"]
        assert raised == message(one, two, "does not see that").format(given=own)
        assert "run.lock" in left
        raised, left = found["read-only"]
        shared = tmp_path / "shared"
        assert raised == message(shared, shared, "cannot write there (Read-only file system)").format(given=shared)
        assert left == ["run.lock"]
