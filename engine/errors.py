"""The exceptions that end a run with a message, and what a misspelt name was probably meant to be."""

import difflib
import re
import shlex
from collections.abc import Iterable


class UserError(Exception):
    """A flag, file, data row or model that cannot work.

    Its message is all that the user sees (no stack trace, exit code 2), so it names the field or the file and line, the
    value found there, and what to do.
    """


class SharedError(UserError):
    """A UserError that all ranks raise together: it is told once."""


class RunStopped(Exception):
    """A run that cannot go on, by no mistake that could have been caught before: a NaN, say.

    Its message says at which step, with which samples, and what to look at. Exit code 1; checkpoints stay.

    good_until: the last step after which the weights were sound, infinite where they all were: the program then names
    the newest checkpoint up to there (training/checkpoints/saving.py). None: nothing is said of checkpoints.
    """

    def __init__(self, message: str, good_until: float | None = None):
        super().__init__(message)
        self.good_until = good_until


class EndedEarly(Exception):
    """A run that was asked to end and has saved all that it needs to go on.

    Its message says where. Exit code 75.
    """


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, for "did you mean"; None where none is like it."""
    near = nearest_names(name, known)
    return near[0] if near else None


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """The known name that is most like this one, and up to two that are about as much like it; none where none is."""
    near = difflib.get_close_matches(name, list(known), 3, cutoff=0.5)
    likeness = [difflib.SequenceMatcher(None, other, name).ratio() for other in near]
    return [other for other, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - 0.04]


def shortened(value: object, limit: int = 100) -> str:
    """A value as a message shows it: in one line, and cut behind `limit` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[:limit] + "..."


def without_query(text: str) -> str:
    """A text as messages and files show it: its URLs without what follows "?", which may be a key, and without users'
    names and passwords."""
    return re.sub(r"(?i)\b(https?://)(?:[^\s/?#]*@)?([^\s?]*)(?:\?\S*)?", r"\1\2", text)


def shown_command(words: Iterable[str]) -> str:
    """A command as messages and files show it: quoted for a shell, its URLs `without_query`."""
    return shlex.join(map(without_query, words))
