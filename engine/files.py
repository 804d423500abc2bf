"""Paths that a user names, and careful reading of files that other programs wrote.

Only regular files are opened, because opening a pipe waits for a writer, and opening a device may do anything. A Git
LFS pointer is a small text that a clone has in place of a large file that was not fetched. Every fault of a JSON text
is raised as a ValueError. A name that occurs twice in a JSON object is a fault too; Python's own reader would silently
keep the last value.
"""

import contextlib
import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from engine.errors import UserError, shortened

KINDS = {
    stat.S_IFIFO: "it is a pipe, which can be read once only",
    stat.S_IFSOCK: "it is a socket",
    stat.S_IFCHR: "it is a device",
    stat.S_IFBLK: "it is a device",
}


def expanded(path: str, what: str) -> Path:
    """The path with ~ or ~name replaced by the home folder. Raises: UserError, with the flag `what` in its message, if
    there is no such folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{what} {path}: no home folder of {Path(path).parts[0]} is known on this machine. Write the folder out."
        ) from None


def without_links(path: str | Path) -> Path:
    """The absolute path with all links resolved. A link that leads to itself is left as it is; for such a link
    Path.resolve raises RuntimeError, OSError or nothing, depending on Python's version."""
    return Path(os.path.realpath(path))


def open_file(path: str | Path) -> IO[bytes]:
    """The file, opened for reading bytes. Raises: OSError, with the reason in `strerror`, if it is not a regular
    file."""
    _require_file(Path(path).stat().st_mode, path)  # checked first, since opening a device may have effects
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        _require_file(os.fstat(file.fileno()).st_mode, path)
    except OSError:
        file.close()
        raise
    return file


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file. Raises: OSError, as `open_file` does; ValueError for bytes that are not UTF-8."""
    with open_file(path) as file:
        return file.read().decode("utf-8")


def _require_file(mode: int, path: str | Path) -> None:
    kind = KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise OSError(errno.EINVAL, kind, str(path))


@contextlib.contextmanager
def rust_panics() -> Iterator[None]:
    """Within this context a panic in a library written in Rust (tokenizers, where a regex gives up at a text) is raised
    as UserError. pyo3 raises it as a BaseException, which no `except Exception` catches; its class cannot be
    imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"a tokenizer fails ({error}). Use another one, or leave out the text at which it fails."
        ) from None


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Within this context, file system errors (for example a full disk) in libraries written in Rust (safetensors,
    tokenizers) are raised as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


BEGINNING = b"version https://git-lfs.github.com/spec/v1"


def refuse_pointers(files: Iterable[Path], what: str) -> None:
    """Raise UserError, with the flag `what` in its message, if one of the files is a Git LFS pointer."""
    for file in files:
        problem = lfs_problem(file)
        if problem is not None:
            raise UserError(f"{what}: {problem}")


def lfs_problem(path: str | Path) -> str | None:
    """A message with the remedy if the file is a Git LFS pointer; None for any other file, and for a file that cannot
    be read."""
    try:
        with open_file(path) as file:
            beginning = file.read(len(BEGINNING))
    except OSError:
        return None
    if beginning != BEGINNING:
        return None
    return (
        f"{path} is a Git LFS pointer: it stands for a file that was not fetched. Run `git lfs pull` in "
        f"{Path(path).absolute().parent}."
    )


class RepeatedName(ValueError):
    """A JSON object has a name more than once. fields: the object as Python reads it. name, count: the repeated name,
    and how often it occurs."""

    def __init__(self, fields: dict[str, object], name: str, count: int):
        super().__init__(f"{name} occurs {count} times")
        self.fields = fields
        self.name = name
        self.count = count


def parsed_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises: ValueError if the text is not JSON, or is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets within brackets, too deep") from None


def misfit(value: Any, kind: Any, name: str = "it") -> str | None:
    """What is wrong with a JSON value that should be of a kind, in words that begin with its name; None if it fits.

    kind: a type, or a union of types; [kind] for a list of any length, and [kind, kind, ...] for one of this length;
    {str: kind} for an object with any names, and {name: kind, ...} for one with at least these names. A name that is
    absent counts as null. A tuple has alternatives: the last one's fault is told.
    """
    if isinstance(kind, tuple):
        faults = [misfit(value, each, name) for each in kind]
        return None if None in faults else faults[-1]
    fits = isinstance(value, type(kind) if isinstance(kind, dict | list) else kind)
    if not fits or (isinstance(value, int) and not -(2**63) <= value < 2**63):  # numpy takes no larger one
        return f"{name} is {shortened(value)}"
    parts: list[tuple] = []
    if isinstance(kind, dict) and isinstance(value, dict):
        parts = [(value.get(key), kind.get(key, kind.get(str)), key) for key in (value if str in kind else kind)]
    elif isinstance(kind, list):
        if len(kind) not in (1, len(value)):
            return f"{name} has {len(value)} items, not {len(kind)}"
        parts = [(each, kind[number % len(kind)], number) for number, each in enumerate(value)]
    return next((fault for each, inner, key in parts if (fault := misfit(each, inner, f"{name}.{key}"))), None)


def unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A dict of these names and values. Raises: RepeatedName if a name occurs twice."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise RepeatedName(dict(pairs), name, count)
    return dict(pairs)
