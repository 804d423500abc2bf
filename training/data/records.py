"""Records: what stands in a data file, as it was read and not yet checked, each with its place in the file.

    records = read_records("reviews/sft.jsonl")
    where, record = records[0]                               # "reviews/sft.jsonl, line 1", {"text": "..."}

JSON and CSV are read here and not by the loaders of the `datasets` library: these give no line numbers, guess types,
and keep copies by a file's time stamp. A record is parsed when it is asked for.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pyarrow

from engine.errors import UserError
from training.data.compressed import COMPRESSIONS, compression, data_ending, refuse_compressed
from training.data.data_file import DataFile
from training.data.line_index import LineIndex
from training.data.table_files import mapped_parquet

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
LONGEST_TEXT = 10_000_000  # characters; tokenizers take 20 seconds for as many, and minutes and all memory for more
LONGEST_CELL = 2**31 - 1  # of a CSV file, in characters; the csv module's own limit is 131,072


class Records(Protocol):
    """The records of one file or split, as (where, record): the place that messages name, and any JSON value.

    fingerprint: a hash of the content. Caches and restart points know the data by it.
    """

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[str, object]: ...


class RecordList:
    """Records that were parsed when the file was read."""

    def __init__(self, records: Sequence[tuple[str, object]], fingerprint: str):
        self.records, self.fingerprint = records, fingerprint

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[str, object]:
        return self.records[index]


class JsonLines:
    """One JSON value a line; blank lines are passed over. A line ends at a newline only: strings may hold U+2028."""

    def __init__(self, file: DataFile):
        self.path, self.file, self.lines = file.path, file, LineIndex(file)
        self.fingerprint = self.lines.fingerprint

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[str, object]:
        start, end, number = self.lines[index]
        line = _decoded(self.path, self.file.read(start, end), number)
        try:
            return f"{self.path}, line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            raise UserError(
                f"{self.path}, line {number}: found {shortened(line.rstrip())}, which is no JSON "
                f"({_reason(error)}). Write one JSON object a line."
            ) from None


class ArrowRecords:
    """The records of a `datasets.Dataset`; `name` is what messages call it."""

    def __init__(self, dataset, name: str, fingerprint: str):
        self.dataset, self.name, self.fingerprint = dataset, name, fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[str, object]:
        where = f"{self.name}, record {index + 1}"
        try:
            return where, self.dataset[index]
        except (ValueError, OSError, pyarrow.ArrowException) as error:  # ValueError: also a text that is not UTF-8
            raise UserError(f"{where}: cannot be read ({_reason(error)}). Write the file again.") from None


def read_records(path: str | Path) -> Records:
    """The records of a .jsonl, .json, .csv or .parquet file, possibly none; it may be compressed (.jsonl.gz, .csv.zst).

    A .json file holds a list of objects, or like a .jsonl one object a line. Raises UserError, with the file and the
    line, for what cannot be read; for a line of a .jsonl file when its record is asked for.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: found a directory; name one file in it.")
    file, ending = DataFile(path), data_ending(path)
    if ending not in ENDINGS:
        raise UserError(
            f"{path}: found the ending '{ending}{compression(path)}'; data files end in .jsonl (one JSON object a "
            "line), .json (a list of objects), .csv (with a line of column names) or .parquet, with "
            f"{' or '.join(COMPRESSIONS)} behind it where they are compressed. Convert or rename the file."
        )
    if compression(path):
        file.decompress()
    refuse_compressed(path, file.read(0, 8))
    if ending == ".parquet":
        return _parquet(file)
    is_list = ending == ".json" and file.read(0, 4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"{"
    if ending != ".csv" and not is_list:
        return JsonLines(file)
    content = file.read()
    records = _csv_list if ending == ".csv" else _json_list
    return RecordList(records(path, _decoded(path, content)), hashlib.sha256(content).hexdigest())


def _decoded(path: Path, content: bytes, first_line: int = 1) -> str:
    """Bytes that begin at a line of the file as text; a byte-order mark, which some editors write, is left out."""
    try:
        text = content.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = first_line + error.object.count(b"\n", 0, error.start)
        raise UserError(
            f"{path}, line {line}: found the byte 0x{error.object[error.start]:02x}, which is not UTF-8. "
            "Save the file as UTF-8."
        ) from None
    if "\0" in text:
        line = first_line + text.count("\n", 0, text.index("\0"))
        raise UserError(
            f"{path}, line {line}: found a NUL character, as in UTF-16 or in a file whose writing was cut "
            "off. Save the file as UTF-8, or write it again."
        )
    return text


def _json_list(path: Path, text: str) -> list[tuple[str, object]]:
    """(where, record) of each element of the list; none in a file of blanks."""
    if not text.strip():
        return []
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        number = getattr(error, "lineno", 1)
        raise UserError(
            f"{path}, line {number}: found {shortened(text.split(chr(10))[number - 1])}, which is no JSON "
            f"here ({_reason(error)}). Write one list of objects, or one object a line."
        ) from None
    if not isinstance(records, list):
        raise UserError(
            f"{path}, line 1: found {described(records)}; a .json file is a list of objects. Put the records into [ ]."
        )
    return [(f"{path}, record {number}", record) for number, record in enumerate(records, start=1)]


def _csv_list(path: Path, text: str) -> list[tuple[str, dict]]:
    """(where, record) of each line under the header; an empty cell is None: there is no other way to leave one out."""
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records, header, start = [], None, 1
    try:
        for cells in reader:
            where, start = f"{path}, line {start}", reader.line_num + 1
            if not cells:
                continue
            if header is None:
                header = _csv_header(where, cells)
                continue
            if len(cells) > len(header):
                raise UserError(
                    f"{where}: found {len(cells)} cells in the {len(header)} columns {', '.join(header)}. "
                    "Put cells that hold commas or line breaks into double quotes."
                )
            cells += [""] * (len(header) - len(cells))
            records.append((where, {name: cell or None for name, cell in zip(header, cells)}))
    except csv.Error as error:
        line = text.split("\n")[start - 1]
        raise UserError(
            f"{path}, line {start}: found {shortened(line)}, which is no CSV ({error}). Close each double "
            "quote, and double the quotes inside of cells."
        ) from None
    return records


def _csv_header(where: str, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if len(set(names)) < len(names):
        raise UserError(f"{where}: found the column names {', '.join(names)}; each may stand there once. Rename them.")
    return names


def _parquet(file: DataFile) -> ArrowRecords:
    from datasets import Dataset

    fingerprint = file.hash()
    try:
        table = mapped_parquet(file.file)  # not Dataset.from_parquet, which keeps a copy by the file's time stamp
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file.path}: found no Parquet that can be read ({_reason(error)}). Write it again.") from None
    file.check()  # what was hashed is what was read
    return ArrowRecords(Dataset(table), str(file.path), fingerprint)


def check_text(where: str, column: str, value: object, may_be_blank: bool = False) -> None:
    """Raise UserError, with the place and the column, unless the value is a text that a tokenizer takes."""
    problem = None
    if not isinstance(value, str):
        problem = f"found {described(value)}; needed a string"
    elif not value.strip() and not may_be_blank:
        problem = f"found {shortened(value)}; needed a text that is not blank"
    elif len(value) > LONGEST_TEXT:
        problem = f"found {len(value):,} characters; needed at most {LONGEST_TEXT:,}"
    elif "\0" in value:
        problem = f"found a NUL character in {shortened(value)}; needed a text without it"
    elif re.search("[\ud800-\udfff]", value):
        problem = f"found half a surrogate pair in {shortened(value)}; needed complete characters"
    if problem:
        raise UserError(f"{where}, column {column}: {problem}. Mend the record or take it out.")


def described(value: object) -> str:
    """The JSON kind of the value, and its beginning."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a truth value",
        type(None): "null",
        int: "a number",
        float: "a number",
    }
    name = type(value).__name__
    return f"{kinds.get(type(value), f'a value of type {name}')} ({shortened(json.dumps(value, default=str))})"


def shortened(text: str, limit: int = 60) -> str:
    """The text in quotes with control characters escaped, cut at `limit` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def _reason(error: Exception) -> str:
    """A parser's complaint, shortened."""
    if isinstance(error, RecursionError):
        return "brackets within brackets, too deep"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return shortened(str(error).strip().split("\n")[0], 160)[1:-1]
