"""What a run could not write, and went on without: told at once, and once more at its end, which then is no success."""

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path

from engine import distributed
from engine.errors import RunStopped, UserError

_noted: dict[str, str] = {}


def reason_of(error: BaseException) -> str:
    """Why something could not be written, in words; a full disk's with the space that is left."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{words}: free some space" if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else words


def note(what: str | Path, error: BaseException) -> None:
    """Print, once for each `what`, that it cannot be written and that the run goes on."""
    if str(what) not in _noted:
        _noted[str(what)] = reason_of(error)
        print(f"WARNING: {what} cannot be written ({reason_of(error)}). The run goes on.", file=sys.stderr, flush=True)


@contextlib.contextmanager
def going_on(what: str | Path) -> Iterator[None]:
    """Note what cannot be written in this block, or read back, and go on behind it."""
    try:
        yield
    except (OSError, UserError) as error:
        note(what, error)


def written_after_all(what: str | Path) -> None:
    """Take back a note: what was missing stands there by now."""
    if _noted.pop(str(what), None) is not None:
        print(f"{what} could be written again; nothing of it is missing.", file=sys.stderr, flush=True)


def forget() -> None:
    """Begin a run in which everything could be written so far."""
    _noted.clear()


def check_all_written() -> None:
    """Raise RunStopped on all ranks, with a list, if rank 0 could not write something (all ranks call this)."""
    missing = distributed.broadcast_object("; ".join(f"{what} ({reason})" for what, reason in _noted.items()))
    if missing:
        raise RunStopped(f"the run came to its end, but not all of it is on the disk: {missing}.")
