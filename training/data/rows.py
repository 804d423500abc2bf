"""Rows of a data file, checked: texts in the columns that are needed, and messages that say what is wrong where.

    rows = read_rows("reviews/sft.jsonl", SFT_COLUMNS)
    training, held_out = split_held_out(rows, 0.05, seed=0)

The steps' own data, of many forms and from many places, are read by training/data/mixture.py, with the same checks.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.errors import UserError
from training.data.records import described, read_records, shortened

Columns = tuple[tuple[str, ...], ...]  # alternatives, each a set of columns that a row has to have

SFT_COLUMNS: Columns = (("prompt", "response"), ("text",))
PAIR_COLUMNS: Columns = (("prompt", "chosen", "rejected"),)
PROMPT_COLUMNS: Columns = (("prompt",),)


def read_rows(path: str | Path, columns: Columns) -> list[dict]:
    """The rows of the file, each with one of the alternatives in `columns` as strings.

    A row is read by the first alternative whose columns it all has (null counts as absent). The columns of the other
    alternatives are removed from it, so that `"text" in row` is an unambiguous question; columns that no alternative
    names (an answer for a reward function, say) stay as they are.

    Raises UserError with the file and the line, or in a JSON list or Parquet file the row, both counted from 1.
    """
    records = read_records(path)
    if not len(records):
        raise UserError(f"{path}: found no rows; it needs at least one with {alternatives(columns)}.")
    rows = []
    for where, value in (records[index] for index in range(len(records))):
        wanted = matching_columns(where, value, columns)
        for name in wanted:
            check_text(where, name, value[name], may_be_empty=name == "prompt" and len(wanted) > 1)
        others = {name for names in columns for name in names}.difference(wanted)
        rows.append({name: cell for name, cell in value.items() if name not in others})
    return rows


def matching_columns(where: str, row: object, columns: Columns) -> tuple[str, ...]:
    """The first alternative that the row has all columns of; raises UserError if there is none."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: found {described(row)}; a row is an object with {alternatives(columns)}.")
    present = {name for name, value in row.items() if value is not None}
    wanted = next((names for names in columns if present.issuperset(names)), None)
    if wanted is None:
        found = ", ".join(name if name in present else f"{name} (null)" for name in row) or "none"
        raise UserError(
            f"{where}: found the columns: {shortened(found, 400)[1:-1]}; needed: {alternatives(columns)}. "
            "Rename or add them."
        )
    return wanted


def check_text(where: str, column: str, value: object, may_be_empty: bool = False) -> None:
    """Raise UserError unless the value is a text that a tokenizer takes."""
    problem = _problem(value, may_be_empty)
    if problem:
        raise UserError(f"{where}, column {column}: {problem}. Mend the row or take it out.")


def split_held_out(
    rows: Sequence,
    held_out: float,
    seed: int,
    what: str = "held-out rows",
    advice: str = "Give a fraction between 0 and 1, or a whole number smaller than the number of rows.",
) -> tuple[list, list]:
    """(training rows, held-out rows), drawn by `seed` alone, both in the order of the file.

    held_out: a fraction of the rows when below 1, otherwise a number of rows. what: for the message, where the number
    and the rows come from. advice: what to do then.
    """
    count = round(held_out * len(rows)) if held_out < 1 else held_out
    if count != int(count) or not 0 < count < len(rows):
        raise UserError(
            f"{what}: cannot hold out {held_out:g} of {len(rows)} rows: both parts need at least one row. {advice}"
        )
    chosen = set(np.random.default_rng(seed).permutation(len(rows))[: int(count)].tolist())
    return (
        [row for index, row in enumerate(rows) if index not in chosen],
        [row for index, row in enumerate(rows) if index in chosen],
    )


def _problem(value: object, may_be_empty: bool) -> str | None:
    """What keeps the value from being a text that a tokenizer takes; None when nothing does."""
    if not isinstance(value, str):
        return f"found {described(value)}; needed a string"
    if not value.strip() and not may_be_empty:
        return f"found {shortened(value)}; needed a text that is not blank"
    if "\0" in value:
        return f"found a NUL character in {shortened(value)}; needed a text without it"
    if re.search("[\ud800-\udfff]", value):
        return f"found half a surrogate pair in {shortened(value)}; needed whole characters"
    return None


def alternatives(columns: Columns) -> str:
    """The alternatives in words, for a message."""
    return ", or ".join(" + ".join(names) for names in columns)
