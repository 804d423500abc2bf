"""A configuration of another system, translated field by field: lines for our YAML, and what has no counterpart."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from engine.errors import UserError, nearest, shortened
from training.convert.entries import Entry, Kind


@dataclass(frozen=True, slots=True)
class Line:
    """A flag of ours with its value, and why it has that. "set": the value is FIELD=VALUE of the dialect."""

    flag: str
    value: object
    why: str


@dataclass(slots=True)
class Translation:
    """lines: in order. missing: what has no counterpart, or has to be decided. idle: what needs none. launcher: the
    command that starts so many processes."""

    lines: list[Line] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    launcher: str = "deepspeed"

    def add(self, flag: str, value: object, why: str) -> None:
        """A flag's line."""
        self.lines.append(Line(flag, value, why))

    def set(self, name: str, value: object, why: str) -> None:
        """A line that gives a field of the dialect a value."""
        self.lines.append(Line("set", f"{name}={as_word(value)}", why))

    def value(self, flag: str) -> object:
        """The value of a flag's line; None where it has none."""
        return next((line.value for line in self.lines if line.flag == flag), None)

    def taken_out(self, flag: str) -> list[Line]:
        """A flag's lines, which are no longer there."""
        found = [line for line in self.lines if line.flag == flag]
        self.lines = [line for line in self.lines if line.flag != flag]
        return found


@dataclass(frozen=True, slots=True)
class Given:
    """The fields that a configuration has, and the table's defaults of those that it has not."""

    fields: Mapping[str, object]
    table: Mapping[str, Entry]

    def __getitem__(self, name: str) -> object:
        found = self.fields.get(name)
        return self.table[name].default if found is None else found

    def number(self, name: str) -> float:
        """A field as a finite number; raises UserError for what is none."""
        return _number(name, self[name])

    def numbers(self, name: str, count: int) -> list[float]:
        """A field as a list of so many finite numbers; raises UserError for what is none."""
        values = self[name]
        if not isinstance(values, list | tuple) or len(values) != count:
            raise UserError(f"{name} {shortened(values)}: needed are {count} numbers.")
        return [_number(name, value) for value in values]

    def integer(self, name: str) -> int:
        """A field as a whole number of either sign; raises UserError for what is none."""
        value = self.number(name)
        if value != int(value):
            raise UserError(f"{name} {shortened(self[name])}: needed is a whole number.")
        return int(value)

    def whole(self, name: str) -> int:
        """A field as a whole number of 1 or more; raises UserError for what is none."""
        value = self.integer(name)
        if value < 1:
            raise UserError(f"{name} {shortened(self[name])}: needed is a whole number of 1 or more.")
        return value

    def true(self, name: str) -> bool:
        """Whether a field is on; raises UserError for what is neither true nor false."""
        value = self[name]
        if not isinstance(value, bool | None):
            text = str(value).lower()
            if text not in ("true", "false"):
                raise UserError(f"{name} {value!r}: needed is true or false.")
            value = text == "true"
        return bool(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Another system. source: which version the table is of. relations: adds the lines of fields that mean something
    together; it is told the ranks, None where they are not known. named: the fields by the table's names. program: what
    calls its program within a command line, and program_name the same in words."""

    name: str
    source: str
    table: Mapping[str, Entry]
    relations: Callable[[Given, Translation, int | None], None]
    named: Callable[[Mapping[str, object]], dict[str, object]]
    program: re.Pattern[str]
    program_name: str


def translate(
    system: System, fields: Mapping[str, object], ranks: int | None = None, skipped: Collection[str] = ()
) -> Translation:
    """The translation of a configuration.

    skipped: fields of no table that are passed over. Raises: UserError for another field that the table does not have,
    and for values that contradict each other.
    """
    found = Translation(launcher="deepspeed" + (f" --num_gpus {ranks}" if ranks else ""))
    for name in fields:
        if name not in system.table:
            if name in skipped:
                found.missing.append(f"{name}: unknown, and passed over (--skip_unknown)")
                continue
            near = nearest(name, list(system.table))
            raise UserError(
                f"unknown field {name} of {system.name}{f' (did you mean {near}?)' if near else ''}: the table is of "
                f"{system.source}. Take it out, or give --skip_unknown."
            )
    given = Given(fields, system.table)
    system.relations(given, found, ranks)
    for name, entry in system.table.items():
        if name in fields or entry.written:
            _translate_one(name, entry, given, name in fields, found)
    return found


def _translate_one(name: str, entry: Entry, given: Given, is_given: bool, found: Translation) -> None:
    value = given[name]
    shown = "(not shown)" if entry.secret and not isinstance(value, bool | None) else _shown(value)
    told = f"{name} {shown}" + ("" if is_given else ", its default")
    if entry.kind == Kind.ABSENT:
        if not any(_equal(value, harmless) for harmless in entry.asks_nothing):
            found.missing.append(f"{told}: {entry.note}")
    elif entry.kind == Kind.IDLE:
        found.idle.append(f"{told}: {entry.note}")
    elif entry.kind == Kind.SAME and value is not None:
        if entry.values:
            key = value if isinstance(value, bool) else str(value)
            if key not in entry.values:
                found.missing.append(f"{told}: {entry.otherwise or entry.note or 'this value has no counterpart'}")
                return
            value = entry.values[key]
            if value is None:  # that is the default here
                return
        why = told + (f": {entry.note}" if entry.note else "")
        for flag in entry.flags:
            found.add(flag, value, why)
        for setting in entry.settings:
            found.set(setting, value, why)


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"{name} {shortened(value)}: found no number. Give one.")
    return found


def _equal(value: object, other: object) -> bool:
    if value == other or str(value).lower() == str(other).lower():
        return True
    try:
        return float(value) == float(other)
    except (TypeError, ValueError):
        return False


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def as_word(value: object) -> str:
    """A value as a word of --set."""
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return ",".join(f"{item:g}" if isinstance(item, int | float) else str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def generation_sizes(found: Translation, prompts: int, at_once: int, why: str) -> None:
    """The lines of so many prompts of a rank, of which at most `at_once` are answered together: as many as divide them.

    How many are answered together changes time and memory, and no number.
    """
    size = next(number for number in range(min(prompts, max(1, at_once)), 0, -1) if prompts % number == 0)
    found.add("per_device_generation_batch_size", size, f"{why}; of these at most {at_once} at once")
    found.add("generation_batches", prompts // size, f"{prompts} prompts of a rank in a step / {size}")
