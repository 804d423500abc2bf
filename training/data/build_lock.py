"""One process at a time makes a file of the cache; the others of this machine, and of those that share it, wait.

The lock is the system's own (flock) on a file beside the one that is made: it is gone with the process that holds it,
however that ends. Where processes of two nodes do not see one folder, or the file system has no locks, each goes on.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from training.data.progress import FIRST, LAST, say
from training.data.table_files import Unwritten

BETWEEN = 0.2  # seconds between two tries

_held: dict[int, str] = {}  # by descriptor, who holds the lock


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Hold the lock of this path while the block runs, when nobody else does; says whether it is held.

    Now and then a line says whom this process waits for, and how far that one is. Raises: Unwritten where no file can
    be made there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path)
    except OSError as error:
        raise Unwritten(error) from None
    try:
        yield descriptor is not None
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if descriptor is not None:
            _held.pop(descriptor, None)
            os.close(descriptor)


def note(line: str) -> None:
    """Write into the locks that this process holds how far it is."""
    for descriptor, who in _held.items():
        with contextlib.suppress(OSError):
            content = json.dumps([who, line]).encode()
            os.ftruncate(descriptor, os.pwrite(descriptor, content, 0))


def _locked(path: Path) -> int | None:
    """The descriptor of the file that is locked; None where the file system has no locks."""
    due, started = time.monotonic() + FIRST, time.monotonic()
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):  # and not one that its holder has removed meanwhile
                _held[descriptor] = f"process {os.getpid()} on {socket.gethostname()}"
                note("")
                return descriptor
            os.close(descriptor)
            continue
        except BlockingIOError:
            os.close(descriptor)
        except OSError:  # no locks here
            os.close(descriptor)
            return None
        if time.monotonic() >= due:
            now = time.monotonic()
            due = now + min(max((now - started) / 10, FIRST), LAST)
            say(_waiting(path))
        time.sleep(BETWEEN)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _waiting(path: Path) -> str:
    try:
        who, line = json.loads(path.read_text())
    except (OSError, ValueError):
        who, line = "another process", ""
    return f"waiting for {who}, which tokenises the same data ({path}){f'; {line}' if line else ''}"
