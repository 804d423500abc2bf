"""Paths that a user names, and errors of libraries written in Rust.

A Git LFS pointer is a small text that a clone has in place of a large file that was not fetched.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from engine.errors import UserError


def without_links(path: str | Path) -> Path:
    """The absolute path with all links resolved. A link that leads to itself is left as it is; for such a link
    Path.resolve raises RuntimeError, OSError or nothing, depending on Python's version."""
    return Path(os.path.realpath(path))


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
        with Path(path).open("rb") as file:
            beginning = file.read(len(BEGINNING))
    except OSError:
        return None
    if beginning != BEGINNING:
        return None
    return (
        f"{path} is a Git LFS pointer: it stands for a file that was not fetched. Run `git lfs pull` in "
        f"{Path(path).absolute().parent}."
    )
