"""Print dialects side by side, and what their fields mean.

python -m engine.algorithms                           # all fields of all dialects
python -m engine.algorithms deepspeed_chat openai     # only the fields in which these differ
"""

import dataclasses
import shutil
import signal
import sys
import textwrap

from engine.algorithms import DIALECTS, Dialect, get_dialect
from engine.errors import UserError


def fields_to_show(dialects: list[Dialect]) -> list[str]:
    """The fields to print: all if one dialect or every dialect is shown, otherwise those in which the shown dialects
    differ. The field `name` is never among them."""
    names = [field.name for field in dataclasses.fields(Dialect) if field.name != "name"]
    if len(dialects) in (1, len(DIALECTS)):
        return names
    return [name for name in names if len({getattr(dialect, name) for dialect in dialects}) > 1]


def cell(value) -> str:
    """A field's value as a short text for a cell of the table."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(cell, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def render(names: list[str], dialects: list[Dialect], width: int) -> str:
    """A table with a line for each field and a column for each dialect, split into tables of at most `width`
    characters."""
    first = ["", *names]
    columns = [[dialect.name, *(cell(getattr(dialect, name)) for name in names)] for dialect in dialects]
    tables: list[list[list[str]]] = []
    room = 0
    for column in columns:
        room -= 1 + max(map(len, column))
        if not tables or room < 0:
            tables.append([first])
            room = width - max(map(len, first)) - 1 - max(map(len, column))
        tables[-1].append(column)
    return "\n\n".join(map(_table, tables))


def _table(columns: list[list[str]]) -> str:
    padded = [[text.ljust(max(map(len, column))) for text in column] for column in columns]
    lines = [" ".join(row).rstrip() for row in zip(*padded)]
    return "\n".join([lines[0], " ".join("-" * len(column[0]) for column in padded), *lines[1:]])


def meanings(names: list[str], width: int) -> str:
    """The meanings of the fields, one paragraph for each field."""
    indent = max(map(len, names)) + 1
    return "\n".join(
        textwrap.fill(
            f"{name:{indent}}{Dialect.__dataclass_fields__[name].metadata['help']}",
            width,
            subsequent_indent=" " * indent,
        )
        for name in names
    )


def main(words: list[str], width: int = 160) -> str:
    """The text to print for dialects with these names; raises UserError for an unknown name."""
    if {"-h", "--help"} & set(words):
        return f"{(__doc__ or '').strip()}\n\ndialects: {', '.join(DIALECTS)}"
    dialects = [get_dialect(word) for word in dict.fromkeys(words or DIALECTS)]
    names = fields_to_show(dialects)
    return f"{render(names, dialects, width)}\n\n{meanings(names, width)}" if names else "no field differs"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may stop reading early
    try:
        print(main(sys.argv[1:], shutil.get_terminal_size((160, 0)).columns))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
