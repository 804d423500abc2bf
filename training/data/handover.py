"""What the first rank of a node has read, for the others of that node: they take its tables from the cache.

    with recorded() as found:                            # on the first rank
        examples = load()
    examples = repeated(load, found)                     # on another one: reads no data set

Of the rows themselves an example has no need: how many there were and what they are known by is enough to find its
table. Where that is not there, because no cache can be written, each rank reads for itself.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

Result = TypeVar("Result")


class NotHandedOver(Exception):
    """Rows, or the table made of them, that are asked for where only what they are known by is there."""


@dataclass(frozen=True, slots=True)
class KnownRows(Sequence):
    """Rows that another rank has read; see `Rows` of rows.py."""

    size: int
    fingerprint: str

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index) -> NoReturn:
        raise NotHandedOver


@dataclass
class Found:
    """What was read: the rows, in the order in which they were asked for. kept: whether all tables are in the cache."""

    rows: list[tuple[KnownRows, ...]] = field(default_factory=list)
    kept: bool = True


_recording: Found | None = None
_remaining: list[tuple[KnownRows, ...]] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[Found]:
    """Note what is read while the block runs."""
    global _recording
    _recording = found = Found()
    try:
        yield found
    finally:
        _recording = None


def repeated(load: Callable[[], Result], found: Found | None) -> Result:
    """`load()`, in which all rows are those that were found, if they were kept; otherwise all is read again."""
    global _remaining
    if found is None or not found.kept:
        return load()
    _remaining = list(found.rows)
    try:
        return load()
    except NotHandedOver:  # the cache is not one that this rank sees, or was emptied meanwhile
        pass
    finally:
        _remaining = None
    return load()


def handed_over(read: Callable[..., tuple[Sequence, ...]]) -> Callable[..., tuple[Sequence, ...]]:
    """`read`, which gives the rows that were handed over, where some were, and notes what it reads, where asked to."""

    @functools.wraps(read)
    def rows(*args, **options):
        if _remaining is not None:
            if not _remaining:
                raise NotHandedOver
            return _remaining.pop(0)
        parts = read(*args, **options)
        if _recording is not None:
            _recording.rows.append(tuple(KnownRows(len(part), part.fingerprint) for part in parts))
        return parts

    return rows


def note_unkept() -> None:
    """Note that a table is in no cache: other ranks have to make it."""
    if _recording is not None:
        _recording.kept = False
