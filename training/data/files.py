"""Reads the records of .jsonl, .json, .csv and .parquet files, also compressed ones (.gz, .zst).

    records = read_records("reviews/sft.jsonl")
    where, record = records[0]                               # "reviews/sft.jsonl, line 1", {"text": "..."}

Each record comes with its place in the file, for messages. The loaders of the `datasets` library are not used, because
they give no line numbers, guess types (a text that looks like a date becomes a date), and keep cached copies that they
recognise by the file's time stamp.

A record is read and parsed when it is asked for. Files are not mapped into memory: if a mapped file is truncated, a
read beyond its new end kills the process. Compressed files and Parquet files give no access to a single record.
Therefore their content is written once into a temporary file in $TMPDIR. The temporary file has no name, so it vanishes
when the process ends for any reason. A data file that changes while it is used is refused.
"""

import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import pyarrow
from pyarrow import parquet, types

from engine.errors import UserError
from engine.files import lfs_problem, open_file
from training.data.tables import mapped, no_room

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # ending: Arrow's name
BEGINNINGS = {".gz": rb"\x1f\x8b", ".zst": rb"\x28\xb5\x2f\xfd"}
LARGEST_RATIO = 200  # limit of content size / compressed size: real data stay below, repeated bytes reach over 1,000
ALWAYS_ALLOWED = 2**28  # bytes of content that are allowed whatever the ratio
CHUNK = 2**20  # bytes
LONGEST_TEXT = 10_000_000  # characters; a tokenizer takes 20 seconds for them, and minutes and all memory for more
LONGEST_CELL = 2**31 - 1  # characters of a cell of a CSV file; the csv module's default limit is 131,072
NO_BLANK = re.compile(r"[^ \t\r\n]")  # finds the beginning of a JSON value
WORKER = Path(__file__).with_name("table_worker.py")  # decodes Parquet


class Records(Protocol):
    """The records of one file or split. Each is (where, record): its place, for messages, and any JSON value.

    fingerprint: a hash of the content, with which caches and checkpoints identify the data.
    """

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[str, object]: ...


def data_ending(path: str | Path) -> str:
    """The file's ending in lower case, without the ending of its compression: ".csv" for A.CSV.gz."""
    path = Path(path)
    return (Path(path.stem) if compression(path) else path).suffix.lower()


def compression(path: Path) -> str:
    """The ending that names the file's compression, a key of COMPRESSIONS; "" for a file that is not compressed."""
    ending = path.suffix.lower()
    return ending if ending in COMPRESSIONS else ""


def largest_content(file: IO[bytes]) -> int:
    """The limit, in bytes, for the decompressed content of this file."""
    return max(ALWAYS_ALLOWED, LARGEST_RATIO * os.fstat(file.fileno()).st_size)


class DataFile:
    """A data file that stays open.

    Raises: UserError if the file cannot be read, if it is a pipe, a device or a Git LFS pointer, or if it changes while
    it is open.
    """

    def __init__(self, path: Path):
        self.path = path
        pointer = lfs_problem(path)
        if pointer is not None:
            raise UserError(pointer)
        try:
            self.file = open_file(path)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); check the path (relative ones start from {Path.cwd()})."
            ) from None
        self.state = self._state()

    def decompress(self) -> None:
        """Decompress the content into a temporary file, which replaces the compressed file in this object. The
        compressed file may have several members.

        Raises: UserError if the file is damaged or truncated, if its content is implausibly large, or if there is no
        room for the temporary file.
        """
        limit, size = largest_content(self.file), 0
        stream = pyarrow.CompressedInputStream(self.file, COMPRESSIONS[compression(self.path)])
        try:
            content = tempfile.TemporaryFile()  # noqa: SIM115
            while part := self._decompressed(stream):
                size += len(part)
                if size > limit:
                    raise UserError(
                        f"{self.path}: becomes more than {LARGEST_RATIO} times as large when it is decompressed, which "
                        "data hardly do. If it is what you mean, decompress it and give what comes out."
                    )
                content.write(part)
            content.flush()
        except OSError as error:
            raise no_room(error.strerror) from None
        self.check()
        self.file = content
        self.state = self._state()

    def _decompressed(self, stream: pyarrow.CompressedInputStream) -> bytes:
        try:
            return stream.read(CHUNK)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(
                f"{self.path}: cannot be decompressed ({str(error).removesuffix('.')}). Was its writing or fetching "
                f"cut off? Write or fetch it again, or take {self.path.suffix} off its name if it is not compressed."
            ) from None

    def lines(self) -> Iterator[bytes]:
        """The file's lines, each with its newline."""
        self.file.seek(0)
        yield from self.file
        self.check()

    def read(self, start: int = 0, end: int | None = None) -> bytes:
        """The bytes from `start` up to `end`, or up to the end of the file."""
        end, parts = self.state[0] if end is None else end, []
        while start < end:
            part = os.pread(self.file.fileno(), min(end - start, 2**30), start)  # one call gives 2 GB at most
            if not part:
                break
            parts.append(part)
            start += len(part)
        self.check()
        return b"".join(parts)

    def hash(self) -> str:
        """SHA-256 of the content, as hexadecimal digits."""
        self.file.seek(0)
        try:
            digest = hashlib.file_digest(self.file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be read ({error.strerror}). Look at its disk, or give a copy."
            ) from None
        self.check()
        return digest

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self.file.fileno())
        return found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Raise UserError if the file has changed since it was opened."""
        if self._state() != self.state:
            raise UserError(
                f"{self.path}: was changed while it was read. Start again when nothing writes to it, or give a copy."
            )


class RecordList:
    """Records that were parsed when the file was read."""

    def __init__(self, records: Sequence[tuple[str, object]], fingerprint: str):
        self.records, self.fingerprint = records, fingerprint

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[str, object]:
        return self.records[index]


class JsonLines:
    """The records of a .jsonl file: one JSON value in each line; blank lines are skipped. Only a newline ends a line,
    because a JSON string may contain U+2028."""

    def __init__(self, file: DataFile):
        self.path, self.file, self.fingerprint = file.path, file, file.hash()
        self.starts, blank = array("q", [0]), []  # the start of each line, and last the file's end
        for number, line in enumerate(file.lines()):
            self.starts.append(self.starts[-1] + len(line))
            if line.isspace():
                blank.append(number)
        lines = len(self.starts) - 1
        self.numbers = np.delete(np.arange(lines), blank) if blank else range(lines)  # numbers of lines not blank

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[str, object]:
        number = int(self.numbers[index])
        start, end = self.starts[number : number + 2]
        number += 1
        line = _decoded(self.path, self.file.read(start, end), number)
        try:
            return f"{self.path}, line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:  # also raised for a number with thousands of digits
            goes_on = isinstance(error, json.JSONDecodeError) and error.pos >= len(line.rstrip())
            spread = goes_on and data_ending(self.path) == ".jsonl"
            raise UserError(
                f"{self.path}, line {number}: found {quoted(line.rstrip())}, which is no JSON "
                f"({_reason(error)}). Write one JSON object a line"
                f"{', or call the file .json if its JSON is spread over lines' if spread else ''}."
            ) from None

    def begins_whole(self) -> bool:
        """Whether the first line, if there is one, is a whole JSON value."""
        try:
            return not len(self) or bool(self[0])
        except UserError:
            return False


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a value that was not read. why: what the column holds, as messages describe it."""

    why: str


class ArrowRecords:
    """The records of an Arrow table, which comes from a Parquet file or a `datasets.Dataset`. name: the name of the
    file or data set, for messages.

    Values are read as they are stored. Columns of bytes (images, recordings) are not read. Maps become dicts, and texts
    of Arrow's type json are parsed. A value that cannot be read becomes an `Unread`, which is an error only if a step
    needs the value.
    """

    def __init__(self, table: pyarrow.Table, unread: dict[str, Unread], name: str, fingerprint: str):
        """unread: the `unread_columns` of the file or data set, including columns that the table does not hold."""
        self.size, self.unread, self.name, self.fingerprint = len(table), unread, name, fingerprint
        self.types = {field.name: field.type for field in table.schema if field.name not in unread}
        self.json = {
            column
            for column, kind in self.types.items()
            if any(isinstance(part, pyarrow.JsonType) for part in _within(kind))
        }
        self.batches = table.to_batches()
        self.ends = np.cumsum([len(batch) for batch in self.batches])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[str, object]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        batch = self.batches[number]
        place = index - int(self.ends[number]) + len(batch)
        record = {column: self._value(column, batch.column(column)[place]) for column in self.types}
        return f"{self.name}, record {index + 1}", record | self.unread

    def _value(self, column: str, stored: pyarrow.Scalar) -> object:
        try:
            value = stored.as_py(maps_as_pydicts="strict")
            return _decoded_json(value, self.types[column]) if column in self.json else value
        except (ValueError, OverflowError, KeyError, pyarrow.ArrowException) as error:
            # Causes: invalid UTF-8 (a ValueError) or JSON, a time out of the range of Python's dates, a key that occurs
            # twice in a map.
            return Unread(f"what cannot be read ({_reason(error)})")


def unread_columns(schema: pyarrow.Schema) -> dict[str, Unread]:
    """The columns of a table that are not read: columns of bytes, and columns of maps whose keys are not texts."""
    bytes_types = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    text_types = (types.is_string, types.is_large_string, types.is_string_view)
    found = {}
    for field in schema:
        parts, named = list(_within(field.type)), quoted(str(field.type))[1:-1]
        if any(test(part) for part in parts for test in bytes_types):
            found[field.name] = Unread(f"bytes (of the type {named})")
        elif any(types.is_map(part) and not any(test(part.key_type) for test in text_types) for part in parts):
            found[field.name] = Unread(f"a map whose keys are no texts (of the type {named})")
    return found


def _within(kind: pyarrow.DataType) -> Iterator[pyarrow.DataType]:
    """This type and all types that it contains."""
    yield kind
    parts = [kind.value_type] if types.is_dictionary(kind) else [kind.field(n).type for n in range(kind.num_fields)]
    for part in parts:
        yield from _within(part)


def _decoded_json(value, kind: pyarrow.DataType):
    """The value, with all parts of Arrow's type json parsed. kind: the value's Arrow type."""
    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if types.is_struct(kind):
        return {field.name: _decoded_json(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return {key: _decoded_json(item, kind.item_type) for key, item in value.items()}
    return [_decoded_json(item, kind.value_type) for item in value] if hasattr(kind, "value_type") else value


def read_records(path: str | Path) -> Records:
    """The records of a .jsonl, .json, .csv or .parquet file. The file may be empty, and may be compressed (.jsonl.gz,
    .csv.zst).

    A .json file holds a list of objects, or one object after the other. Each object may stand on one line, as in
    .jsonl, or on several. Raises UserError, with file and line, if the file cannot be read. A bad line of a .jsonl file
    raises UserError only when its record is read.
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
    for other, pattern in BEGINNINGS.items():
        if re.match(pattern, file.read(0, 8)):
            raise UserError(
                f"{path}: holds {COMPRESSIONS[other]} data inside of {COMPRESSIONS[compression(path)]} data. "
                "Decompress it once."
                if compression(path)
                else f"{path}: holds {COMPRESSIONS[other]} data. Call it {path.name}{other}, or decompress it."
            )
    if ending == ".parquet":
        return _parquet(file)
    if ending == ".csv":
        read = _csv_list
    elif ending == ".json" and file.read(0, 4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"{":
        read = _json_list
    else:
        lines = JsonLines(file)
        if ending == ".jsonl" or lines.begins_whole():
            return lines
        read = _json_objects
    content = file.read()
    return RecordList(read(path, _decoded(path, content)), hashlib.sha256(content).hexdigest())


def _decoded(path: Path, content: bytes, first_line: int = 1) -> str:
    """The bytes as text, without the byte-order mark that some editors write. first_line: the number of the line at
    which the bytes begin."""
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
    """(where, record) of each element of the list; [] for a file that holds only blanks."""
    if not text.strip():
        return []
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_json(path, text, error) from None
    if not isinstance(records, list):
        raise UserError(
            f"{path}, line 1: found {described(records)}; a .json file is a list of objects. Put the records into [ ]."
        )
    return [(f"{path}, record {number}", record) for number, record in enumerate(records, start=1)]


def _json_objects(path: Path, text: str) -> list[tuple[str, object]]:
    """(where, record) of each object; the objects follow each other, each on one or several lines."""
    decoder, records, end = json.JSONDecoder(), [], 0
    try:
        while found := NO_BLANK.search(text, end):
            record, end = decoder.raw_decode(text, found.start())
            records.append((f"{path}, record {len(records) + 1}", record))
    except (ValueError, RecursionError) as error:
        raise _no_json(path, text, error) from None
    return records


def _no_json(path: Path, text: str, error: Exception) -> UserError:
    number = getattr(error, "lineno", 1)
    return UserError(
        f"{path}, line {number}: found {quoted(text.split(chr(10))[number - 1])}, which is no JSON "
        f"here ({_reason(error)}). Write one list of objects, or one object a line."
    )


def _csv_list(path: Path, text: str) -> list[tuple[str, dict]]:
    """(where, record) of each line below the header. An empty cell becomes None, since CSV cannot leave a value out."""
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records, header, start = [], None, 1
    try:
        for cells in reader:
            where, start = f"{path}, line {start}", reader.line_num + 1
            if not cells:
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                _check_names(where, header)
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
            f"{path}, line {start}: found {quoted(line)}, which is no CSV ({error}). Close each double "
            "quote, and double the quotes inside of cells."
        ) from None
    return records


def _check_names(where: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise UserError(f"{where}: found the column names {', '.join(names)}; each may stand there once. Rename them.")


def _parquet(file: DataFile) -> ArrowRecords:
    fingerprint = file.hash()
    try:
        source = parquet.ParquetFile(file.file)
        _check_names(str(file.path), source.schema_arrow.names)
        unread = unread_columns(source.schema_arrow)
        columns = [name for name in source.schema_arrow.names if name not in unread]
        table = _decoded_table(file, columns)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file.path}: found no Parquet that can be read ({_reason(error)}). Write it again.") from None
    file.check()  # the content that was hashed is the content that was read
    return ArrowRecords(table, unread, str(file.path), fingerprint)


def _decoded_table(file: DataFile, columns: list[str]) -> pyarrow.Table:
    """These columns of a Parquet file, decoded into a temporary file, since Parquet gives no access to single rows.

    A process with a memory limit decodes the columns. Raises: UserError if the content is implausibly large, or if
    there is no room for the temporary file; pyarrow.ArrowException if the file cannot be read.
    """
    with tempfile.TemporaryFile(buffering=0) as copy:
        _decode_apart(file.path, file.file, copy.fileno(), columns)
        return pyarrow.ipc.open_stream(mapped(copy)).read_all()


def check_arrow(path: Path) -> None:
    """Check an Arrow stream, which may be compressed. Raises: UserError if its content is implausibly large; OSError
    for a pipe or device; pyarrow.ArrowException if the file cannot be read."""
    with open_file(path) as file:
        _decode_apart(path, file, None, [])


def _decode_apart(path: Path, file: IO[bytes], copy: int | None, columns: list[str]) -> None:
    """Have a process with a memory limit decode the file (table_worker.py). Raises the errors of `_decoded_table`."""
    limit = largest_content(file)
    asked = json.dumps({"file": file.fileno(), "copy": copy, "columns": columns, "limit": limit}).encode()
    files = [file.fileno()] + ([] if copy is None else [copy])
    done = subprocess.run([sys.executable, "-P", str(WORKER)], input=asked, capture_output=True, pass_fds=files)
    answer = {"unreadable": "it takes Python down with it"}
    if done.stdout:
        answer = json.loads(done.stdout.splitlines()[-1])
    if "unreadable" in answer:
        raise pyarrow.ArrowInvalid(answer["unreadable"])
    if "no_room" in answer:
        raise no_room(answer["no_room"])
    if answer:
        raise UserError(
            f"{path}: becomes more than {limit >> 20:,} MB when it is decoded, or needs more memory than data do. If "
            "it is what you mean, write it as .jsonl and give that."
        )


def check_text(where: str, column: str, value: object, may_be_blank: bool = False) -> None:
    """Raise UserError, with the place and the column, unless the value is a text that a tokenizer can encode."""
    problem = None
    if not isinstance(value, str):
        problem = f"found {described(value)}; needed a string"
    elif not value.strip() and not may_be_blank:
        problem = f"found {quoted(value)}; needed a text that is not blank"
    elif len(value) > LONGEST_TEXT:
        problem = f"found {len(value):,} characters; needed at most {LONGEST_TEXT:,}"
    elif "\0" in value:
        problem = f"found a NUL character in {quoted(value)}; needed a text without it"
    elif re.search("[\ud800-\udfff]", value):
        problem = f"found half a surrogate pair in {quoted(value)}; needed complete characters"
    if problem:
        raise UserError(f"{where}, column {column}: {problem}. Mend the record or take it out.")


def described(value: object) -> str:
    """A text with the value's JSON type and the beginning of the value."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a truth value",
        type(None): "null",
        int: "a number",
        float: "a number",
    }
    if isinstance(value, Unread):
        return value.why
    name = type(value).__name__
    return f"{kinds.get(type(value), f'a value of type {name}')} ({quoted(json.dumps(value, default=str))})"


def quoted(text: str, limit: int = 60) -> str:
    """The text in quotes with control characters escaped, cut at `limit` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def _reason(error: Exception) -> str:
    """A parser's error message, shortened."""
    if isinstance(error, RecursionError):
        return "brackets within brackets, too deep"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return quoted(str(error).strip().split("\n")[0], 160)[1:-1]
