"""A data file as the rows of one form, by the way that the steps read it."""

from pathlib import Path

from training.data.record_forms import Form
from training.data.row_selection import load_rows


def rows_of(path: str | Path, form: Form, tokenizer=None) -> list[dict]:
    """All rows of the file, read and checked."""
    return list(load_rows(str(path), form, tokenizer, phase=1, seed=0)[0])
