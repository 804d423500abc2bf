"""Options are dataclass fields that carry their help text, range and conditions. They define the flags of a program and
the choices of a dialect.

    lam: float = option(0.95, "lambda of GAE", least=0, most=1)

Help texts, documentation pages and checks are generated from these fields.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Collection

REQUIRED = dataclasses.MISSING
LIMITS = (  # (key in the metadata, words for messages, comparison of value and limit)
    ("least", "at least", operator.ge),
    ("above", "greater than", operator.gt),
    ("most", "at most", operator.le),
    ("below", "less than", operator.lt),
)


def option(
    default,
    help: str,
    *,
    choices: Collection[str] | Callable[[], Collection[str]] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = True,
    only_with: str | tuple[str, ...] = (),
    **more,
):
    """A dataclass field that is an option. default: its default value, or REQUIRED if the user must set the option.

    Args:
        choices: the values that the option may have, or a function that returns them. They are read when a value is
            checked, so that entries that a user has added to a table count too.
        least, above, most, below: the range of a number, or of each number of a list. None is in every range.
        finite: whether numbers must be finite.
        only_with: conditions on other options of the same class without which this option has no effect: NAME (the
            option NAME must be set) or NAME=VALUE|VALUE (it must have one of these values). If several conditions are
            given, one is enough.
        more: further keys of the field's metadata.
    """
    conditions = (only_with,) if isinstance(only_with, str) else only_with
    metadata = {"help": help, "choices": choices, "finite": finite, "only_with": conditions, **more}
    metadata |= {"least": least, "above": above, "most": most, "below": below}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(spec: dataclasses.Field):
    """The value of an option that the user does not set; REQUIRED if the user must set it."""
    return spec.default if spec.default_factory is REQUIRED else spec.default_factory()


def choices_of(spec: dataclasses.Field) -> Collection[str] | None:
    """The values that an option may have at present; None if it has no list of values."""
    choices = spec.metadata["choices"]
    return choices() if callable(choices) else choices


def fault(spec: dataclasses.Field, value) -> str | None:
    """The reason why an option cannot have this value, as the end of a sentence; None if it can."""
    known = choices_of(spec)
    several = isinstance(value, (list, tuple))
    values = value if several else (value,)
    may_be_none = value is None and default_of(spec) is None
    if known is not None and not may_be_none and any(one not in known for one in values):
        return f"known are {', '.join(map(str, known))}."
    for number in values:
        if not isinstance(number, (int, float)):
            continue
        must = "each must be" if several and len(value) > 1 else "must be"
        for key, words, met in LIMITS:
            limit = spec.metadata[key]
            if limit is not None and not met(number, limit):
                return f"{must} {words} {limit}."
        if spec.metadata["finite"] and isinstance(number, float) and not math.isfinite(number):
            return f"{must} finite."
    return None


def is_set(value) -> bool:
    """Whether the value of an option counts as set. None, False, 0, "", "none" and an empty list do not."""
    return value not in (None, False, "", "none") and value != []


def unmet(options, spec: dataclasses.Field) -> list[tuple[str, list[str]]]:
    """The conditions of an option's `only_with`, as (name, values), if none of them holds for `options`. Empty if one
    holds, or if the option has no conditions. Conditions on names that are not options of this class are left out."""
    conditions = [
        (name, values.split("|") if values else [])
        for name, _, values in (condition.partition("=") for condition in spec.metadata["only_with"])
        if hasattr(options, name)
    ]
    return [] if any(_holds(getattr(options, name), values) for name, values in conditions) else conditions


def _holds(value, values: list[str]) -> bool:
    given = value if isinstance(value, list) else [value]
    return any(str(one).lower() in values for one in given) if values else is_set(value)
