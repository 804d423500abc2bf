"""Rows of a data file, checked: what steps 1, 2 and 3 read before anything is tokenised.

    rows = read_rows("reviews/sft.jsonl", SFT_COLUMNS)
    training, held_out = split_held_out(rows, 0.05, seed=0)

Files are `.jsonl` (one JSON object a line) or `.json` (a list of objects). Every row is checked at once, so that a
mistake in the last line is told before a model is loaded and not after an hour of training.
"""
import json
import re
from pathlib import Path

import numpy as np

from engine.errors import UserError

SFT_COLUMNS = (("prompt", "response"), ("text",))
PAIR_COLUMNS = (("prompt", "chosen", "rejected"),)
PROMPT_COLUMNS = (("prompt",),)


def read_rows(path: str | Path, columns: tuple[tuple[str, ...], ...]) -> list[dict]:
    """The rows of the file, each with one of the alternatives in `columns` as strings.

    A row is read by the first alternative whose columns it all has (null counts as absent). The columns of the other
    alternatives are removed from it, so that `"text" in row` is an unambiguous question; columns that no alternative
    names (an answer for a reward function, say) stay as they are. Blank lines are passed over.

    Raises UserError with the file and the line of a `.jsonl`, or the row of a `.json`, both counted from 1.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: found a directory; name one .jsonl or .json file in it.")
    if path.suffix not in (".jsonl", ".json"):
        raise UserError(f"{path}: found the ending '{path.suffix}'; data files end in .jsonl (one JSON object a line) "
                        "or .json (a list of objects). Convert or rename the file.")
    text = _read_text(path)
    records = _json_lines(path, text) if path.suffix == ".jsonl" else _json_list(path, text)
    if not records:
        raise UserError(f"{path}: found no rows; it needs at least one with {_alternatives(columns)}.")
    return [_checked_row(where, value, columns) for where, value in records]


def split_held_out(rows: list, held_out: float, seed: int, what: str = "held-out rows") -> tuple[list, list]:
    """(training rows, held-out rows), drawn by `seed` alone, both in the order of the file.

    held_out: a fraction of the rows when below 1, otherwise a number of rows. what: for the message, where the number
    and the rows come from.
    """
    count = round(held_out * len(rows)) if held_out < 1 else held_out
    if count != int(count) or not 0 < count < len(rows):
        raise UserError(f"{what}: cannot hold out {held_out} of {len(rows)} rows: both parts need at least one row. "
                        "Give a fraction between 0 and 1, or a whole number smaller than the number of rows.")
    chosen = set(np.random.default_rng(seed).permutation(len(rows))[:int(count)].tolist())
    return ([row for index, row in enumerate(rows) if index not in chosen],
            [row for index, row in enumerate(rows) if index in chosen])


def _read_text(path: Path) -> str:
    """The file's text; a byte-order mark, which some editors write, is left out."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path (relative ones start from "
                        f"{Path.cwd()}).") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: found the byte 0x{error.object[error.start]:02x}, which is not UTF-8. "
                        "Save the file as UTF-8.") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{path}, line {line}: found a NUL character, as in UTF-16 or in a file whose writing was cut "
                        "off. Save the file as UTF-8, or write it again.")
    return text


def _json_lines(path: Path, text: str) -> list[tuple[str, object]]:
    """(where, value) of each line that is not blank. Lines end at a newline only: JSON strings may hold U+2028."""
    records = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append((f"{path}, line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: found {_shortened(line)}, which is no JSON ({error.msg}, column "
                            f"{error.colno}). Write one JSON object a line.") from None
    return records


def _json_list(path: Path, text: str) -> list[tuple[str, object]]:
    """(where, value) of each element of the list; no rows in a file of blanks."""
    if not text.strip():
        return []
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1]
        raise UserError(f"{path}, line {error.lineno}: found {_shortened(line)}, which is no JSON here ({error.msg}, "
                        f"column {error.colno}). Write one list of objects, or, with one object a line, name the file "
                        ".jsonl.") from None
    if not isinstance(values, list):
        raise UserError(f"{path}, line 1: found {_described(values)}; a .json file is a list of objects. "
                        "Put the rows into [ ].")
    return [(f"{path}, row {number}", value) for number, value in enumerate(values, start=1)]


def _checked_row(where: str, row: object, columns: tuple[tuple[str, ...], ...]) -> dict:
    """The row without the columns of the alternatives that it was not read by."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: found {_described(row)}; a row is an object with {_alternatives(columns)}.")
    present = {name for name, value in row.items() if value is not None}
    wanted = next((names for names in columns if present.issuperset(names)), None)
    if wanted is None:
        found = ", ".join(name if name in present else f"{name} (null)" for name in row) or "none"
        raise UserError(f"{where}: found the columns: {found}; needed: {_alternatives(columns)}. Rename or add them.")
    for name in wanted:
        may_be_empty = name == "prompt" and len(wanted) > 1
        problem = _problem(row[name], may_be_empty)
        if problem:
            raise UserError(f"{where}, column {name}: {problem}. Mend the row or take it out.")
    others = {name for names in columns for name in names}.difference(wanted)
    return {name: value for name, value in row.items() if name not in others}


def _problem(value: object, may_be_empty: bool) -> str | None:
    """What keeps the value from being a text that a tokenizer takes; None when nothing does."""
    if not isinstance(value, str):
        return f"found {_described(value)}; needed a string"
    if not value.strip() and not may_be_empty:
        return f"found {_shortened(value)}; needed a text that is not blank"
    if "\0" in value:
        return f"found a NUL character in {_shortened(value)}; needed a text without it"
    if re.search("[\ud800-\udfff]", value):
        return f"found half a surrogate pair in {_shortened(value)}; needed whole characters"
    return None


def _alternatives(columns: tuple[tuple[str, ...], ...]) -> str:
    return ", or ".join(" + ".join(names) for names in columns)


def _described(value: object) -> str:
    """The JSON kind of the value, and its beginning."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return f"{kinds.get(type(value), 'a number')} ({_shortened(json.dumps(value))})"


def _shortened(text: str, limit: int = 60) -> str:
    """The text in quotes with control characters escaped, cut at `limit` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "...")
