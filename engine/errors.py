"""The exceptions that end a run with a message, and helpers for messages, such as suggestions for misspelt names."""

import difflib
import re
import shlex
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a flag, file, data row or model.

    The user sees only the message, without a stack trace, and the exit code is 2. The message therefore names the field
    or the file and line, the value found there, and what to do. Each argument is a mistake, and is shown on one line.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class SharedError(UserError):
    """A UserError that all ranks raise together; its message is printed once."""


class RunStopped(Exception):
    """A run cannot go on, for a reason that could not be found before it started: for example a NaN.

    The message names the step and the samples, and says what to look at. The exit code is 1; checkpoints are kept.

    good_until: the last step after which the weights were sound; infinite if they were always sound. The program names
    the newest checkpoint up to this step (training/checkpoints/saving.py). If it is None, the program says nothing
    about checkpoints.
    """

    def __init__(self, message: str, good_until: float | None = None):
        super().__init__(message)
        self.good_until = good_until


class EndedEarly(Exception):
    """A run was asked to end, and has saved what it needs to resume.

    The message says where the run was saved. The exit code is 75.
    """


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to `name`, for "did you mean"; None if no known name is similar."""
    near = nearest_names(name, known)
    return near[0] if near else None


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """The known name that is most similar to `name`, and up to two that are about as similar; empty if no known name is
    similar."""
    near = difflib.get_close_matches(name, list(known), 3, cutoff=0.5)
    likeness = [difflib.SequenceMatcher(None, other, name).ratio() for other in near]
    return [other for other, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - 0.04]


def shortened(value: object, limit: int = 100) -> str:
    """A value as a message shows it: in one line, and cut after `limit` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[:limit] + "..."


def in_words(count: int, noun: str) -> str:
    """A number of things as a text: "1 rank", "8 ranks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def without_query(text: str) -> str:
    """A text as messages and files show it. User names, passwords and the part after "?", which may contain a key, are
    removed from its URLs."""
    return re.sub(r"(?i)\b(https?://)(?:[^\s/?#]*@)?([^\s?]*)(?:\?\S*)?", r"\1\2", text)


def shown_command(words: Iterable[str]) -> str:
    """A command as messages and files show it: quoted for a shell, and with the secrets in URLs removed
    (`without_query`)."""
    return shlex.join(map(without_query, words))
