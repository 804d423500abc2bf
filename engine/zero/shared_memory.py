"""DeepSpeed's buffers in shared memory: none are made, and those that dead processes have left are removed.

On CPUs DeepSpeed has each rank make a file of 69 MB in /dev/shm, for the sums of its tensor-parallel layers alone, and
never removes it. Nothing here has such layers: gradients are summed by gloo.
"""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from deepspeed.comm.comm import TorchBackend

_BACKEND = sys.modules[TorchBackend.__module__]  # `deepspeed.comm.torch`, as which that package shows torch itself

SHARED_MEMORY = Path("/dev/shm")
BUFFERS = "deepspeed_allreduce_buffer"  # the start of the files' names; the user's number, address, port, rank follow


@contextlib.contextmanager
def without_buffers() -> Iterator[None]:
    """Have `deepspeed.init_distributed` make no buffers; it then reduces through the process group alone."""
    build = _BACKEND.build_shm_op
    _BACKEND.build_shm_op = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _BACKEND.build_shm_op = build  # type: ignore[attr-defined]


def clear_dead_buffers(folder: Path = SHARED_MEMORY, pattern: str = f"{BUFFERS}_{os.getuid()}_*") -> list[str]:
    """Remove this user's buffers that no living process has; returns their names. pattern: of their files' names.

    A process has its buffer open from the instant it makes it to its end, so that one which nobody has open is a dead
    one's, however young it is.
    """
    removed = []
    for path in sorted(folder.glob(pattern)):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and not _in_use(path):
                path.unlink()
                removed.append(path.name)
    return removed


def _in_use(path: Path) -> bool:
    """Whether any process has the file open or mapped; true where the system cannot tell.

    The kernel gives a lease for writing only on a file that nobody else has. /proc would not do: it does not show the
    processes of another container that shares this folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        # Whoever opens the file meanwhile would have this process sent SIGIO, which ends it; SIGURG is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
