"""What becomes of one field of another system: the rows of the tables.

"kl_coef": same("kl_coef")                              a flag of ours with this meaning
"kl_estimator": dialect("kl_estimator")                 a field of the dialect: --set kl_estimator=VALUE
"response_length": same("max_answer_seq_len", default=53)    their default, which is written where nothing is given
"total_episodes": related(None)                         of several fields together: trl.py, openrlhf.py
"load_in_4bit": absent("no weights of 4 bits", False)   no counterpart, unless the value asks for nothing
"logging_steps": idle("metrics are written each step")  nothing is lost without it
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What is done with a field."""

    SAME = "same"
    RELATED = "related"
    ABSENT = "absent"
    IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """flags: ours, all of which get the value. settings: the dialect's fields that do. default: theirs. written: that
    it is written where nothing is given. values: theirs -> ours; others have no counterpart. asks_nothing:
    values of a field without counterpart that lose nothing. note: beside the line, or why there is none. otherwise:
    what to do about a value that has no counterpart. secret: the value may be a password, and is neither printed nor
    written."""

    kind: Kind
    flags: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    default: object = None
    written: bool = False
    values: Mapping[object, object] = field(default_factory=dict)
    asks_nothing: tuple = ()
    note: str = ""
    otherwise: str = ""
    secret: bool = False


def same(
    *flags: str, default: object = None, values: Mapping | None = None, note: str = "", otherwise: str = ""
) -> Entry:
    """A field that flags of ours mean; its default is written, if there is one."""
    return Entry(
        kind=Kind.SAME,
        flags=flags,
        default=default,
        written=default is not None,
        values=values or {},
        note=note,
        otherwise=otherwise,
    )


def dialect(*settings: str, values: Mapping | None = None, note: str = "") -> Entry:
    """A field that fields of the dialect mean; the dialect that is chosen has its default."""
    return Entry(kind=Kind.SAME, settings=settings, values=values or {}, note=note)


def related(default: object) -> Entry:
    """A field that means something together with others. default: theirs."""
    return Entry(kind=Kind.RELATED, default=default)


def absent(note: str, *asks_nothing: object, secret: bool = False) -> Entry:
    """A field without counterpart. note: what to do instead."""
    return Entry(kind=Kind.ABSENT, asks_nothing=(None, *asks_nothing), note=note, secret=secret)


def idle(note: str, secret: bool = False) -> Entry:
    """A field without which nothing that is computed changes. note: what does its work."""
    return Entry(kind=Kind.IDLE, note=note, secret=secret)
