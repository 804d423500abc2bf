"""The exceptions that end a run with a message, and helpers for messages, such as suggestions for misspelt names."""

import difflib
import re
import shlex
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a flag, file, data row or model.

    The user sees only its message (no stack trace, exit code 2), so it names the field or the file and line, the value
    found there, and what to do.
    """


class SharedError(UserError):
    """A UserError that all ranks raise together; it is printed once."""


class RunStopped(Exception):
    """A run that cannot go on, for a reason that could not be found before it started: a NaN, for example.

    Its message names the step and the samples, and says what to look at. Exit code 1; checkpoints stay.

    good_until: the last step after which the weights were sound; infinite if they always were. The program then names
    the newest checkpoint up to that step (training/checkpoints/saving.py). None: it says nothing about checkpoints.
    """

    def __init__(self, message: str, good_until: float | None = None):
        super().__init__(message)
        self.good_until = good_until


class EndedEarly(Exception):
    """A run that was asked to end, and has saved what it needs to resume.

    Its message says where it was saved. Exit code 75.
    """


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to this one, for "did you mean"; None if none is similar."""
    near = nearest_names(name, known)
    return near[0] if near else None


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """The known name most similar to this one, and up to two that are about as similar; empty if none is."""
    near = difflib.get_close_matches(name, list(known), 3, cutoff=0.5)
    likeness = [difflib.SequenceMatcher(None, other, name).ratio() for other in near]
    return [other for other, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - 0.04]


def shortened(value: object, limit: int = 100) -> str:
    """A value as a message shows it: in one line, and cut behind `limit` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[:limit] + "..."


def without_query(text: str) -> str:
    """A text as messages and files show it: its URLs lose the part after "?", which may be a key, and user names and
    passwords."""
    return re.sub(r"(?i)\b(https?://)(?:[^\s/?#]*@)?([^\s?]*)(?:\?\S*)?", r"\1\2", text)


def shown_command(words: Iterable[str]) -> str:
    """A command as messages and files show it: quoted for a shell, its URLs `without_query`."""
    return shlex.join(map(without_query, words))
