"""Paths that a user names: what they lead to, and files, opened only where they are files.

Opening a pipe waits for a writer, and opening a device may do anything.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from engine.errors import UserError

KINDS = {
    stat.S_IFIFO: "it is a pipe, which can be read once only",
    stat.S_IFSOCK: "it is a socket",
    stat.S_IFCHR: "it is a device",
    stat.S_IFBLK: "it is a device",
}


def expanded(path: str, what: str) -> Path:
    """The path with a user's folder for ~ or ~name; raises UserError, naming `what` (a flag), if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{what} {path}: no home folder of {Path(path).parts[0]} is known on this machine. Write the folder out."
        ) from None


def without_links(path: str | Path) -> Path:
    """The absolute path without links. One that leads to itself stays: Path.resolve raises RuntimeError for it, or
    OSError, or nothing, by Python's version."""
    return Path(os.path.realpath(path))


def open_file(path: str | Path) -> IO[bytes]:
    """The file, opened for reading bytes; raises OSError, whose `strerror` says so, for what is no regular file."""
    _require_file(Path(path).stat().st_mode, path)  # before it is opened, which for a device may do something
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        _require_file(os.fstat(file.fileno()).st_mode, path)
    except OSError:
        file.close()
        raise
    return file


def read_text(path: str | Path) -> str:
    """What stands in a UTF-8 file; raises OSError as `open_file` does, and ValueError for other bytes."""
    with open_file(path) as file:
        return file.read().decode("utf-8")


def _require_file(mode: int, path: str | Path) -> None:
    kind = KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise OSError(errno.EINVAL, kind, str(path))


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Raise as OSError what libraries in Rust (safetensors, tokenizers) raise of a file system: a full disk, say."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # tokenizers raises this class itself
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
