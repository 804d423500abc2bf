"""Data files: the records of .jsonl, .json, .csv and .parquet, also as .gz or .zst, each with its place in the file.

    records = read_records("reviews/sft.jsonl")
    where, record = records[0]                               # "reviews/sft.jsonl, line 1", {"text": "..."}

Files are read here and not by the loaders of the `datasets` library: these give no line numbers, guess types (a text
that looks like a date becomes one), and keep copies by a file's time stamp. A record is parsed when it is asked for.

A file is read where a record is asked for and is not mapped into memory: reading behind the end of a mapped file that
was cut meanwhile kills the process. Compressed files and Parquet, in which no record can be found again, are written
out once into a temporary file without a name in $TMPDIR, which is gone with the process, however that ends. All that is
read of a file belongs to one content: a file that changes is refused.
"""

import csv
import hashlib
import io
import json
import os
import re
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import pyarrow
from pyarrow import parquet, types

from engine.errors import UserError, shortened
from engine.files import lfs_problem, open_file
from training.data.tables import decode_apart, mapped_parquet

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # by ending, as Arrow calls them
BEGINNINGS = {".gz": rb"\x1f\x8b", ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"}  # the last: a frame to skip
LARGEST_RATIO = 200  # of texts and tables; the same few bytes over and over give 1,000 and more
ALWAYS_ALLOWED = 2**28  # bytes, whatever the ratio
CHUNK = 2**20  # bytes
LONGEST_TEXT = 10_000_000  # characters; tokenizers take 20 seconds for as many, and minutes and all memory for more
LONGEST_CELL = 2**31 - 1  # of a CSV file, in characters; the csv module's own limit is 131,072
SMALL_INDEX = 2**20  # bytes of an index of lines that is kept in memory
NO_BLANK = re.compile(r"[^ \t\r\n]")  # with which a JSON value begins
IS_BLANK = np.isin(np.arange(256), list(b" \t\n\r\x0b\x0c"))  # by byte, as bytes.isspace has it


class Records(Protocol):
    """The records of one file or split, as (where, record): the place that messages name, and any JSON value.

    fingerprint: a hash of the content. Caches and checkpoints know the data by it.
    """

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[str, object]: ...


def data_ending(path: str | Path) -> str:
    """The ending that says what a file holds, in small letters, without that of its compression: ".csv" of A.CSV.gz."""
    path = Path(path)
    return (Path(path.stem) if compression(path) else path).suffix.lower()


def compression(path: Path) -> str:
    """The ending of its compression, a key of COMPRESSIONS; empty for one that is not compressed."""
    ending = path.suffix.lower()
    return ending if ending in COMPRESSIONS else ""


def decompressed(path: Path, file: IO[bytes]) -> IO[bytes]:
    """The content of a compressed file, of one or more members, as a temporary file.

    Raises: UserError for what is not compressed as its ending says, or cut off, or damaged, or far larger than data
    are; and where there is no room.
    """
    kind, beginning = COMPRESSIONS[compression(path)], file.read(8)
    if beginning and not re.match(BEGINNINGS[compression(path)], beginning):
        raise UserError(
            f"{path}: begins with {shortened(beginning)}, which no {kind} file does. Take {path.suffix} off its name "
            "if it is not compressed, or fetch it again."
        )
    limit, size = largest_content(file), 0
    again = os.fdopen(os.dup(file.fileno()), "rb")  # for the stream, which closes it
    again.seek(0)
    stream = pyarrow.CompressedInputStream(again, kind)
    try:
        copy = tempfile.TemporaryFile()  # noqa: SIM115
        while part := _next_part(path, file, stream):
            size += len(part)
            if size > limit:
                raise UserError(
                    f"{path}: becomes more than {LARGEST_RATIO} times as large when it is decompressed, which data "
                    "hardly do. If it is what you mean, decompress it and give what comes out."
                )
            copy.write(part)
        copy.flush()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be decompressed into a temporary file ({error.strerror or error}). Set TMPDIR to a "
            "folder where there is room, or decompress it and give what comes out."
        ) from None
    return copy


def largest_content(file: IO[bytes]) -> int:
    """Bytes that this file's content may have when it is decompressed."""
    return max(ALWAYS_ALLOWED, LARGEST_RATIO * os.fstat(file.fileno()).st_size)


def check_arrow(path: Path) -> None:
    """Raise UserError for a stream of Arrow's that becomes far larger than data are: it may be compressed."""
    with open_file(path) as file:
        decode_apart(file, None, [], str(path), largest_content(file))


def _next_part(path: Path, file: IO[bytes], stream: pyarrow.CompressedInputStream) -> bytes:
    try:
        return stream.read(CHUNK)
    except (OSError, pyarrow.ArrowException) as error:
        advice = "Was its writing or fetching cut off? Write or fetch it again."
        end = os.pread(file.fileno(), 16, max(0, os.fstat(file.fileno()).st_size - 16))
        if compression(path) == ".gz" and end == bytes(16):  # more zeros than a member ends in; an empty one has 9
            advice = (
                "It ends in zeros: filled up, as on tapes, or not written to its end. Decompress it with `gzip -dc`, "
                "which tells the two apart, and give what comes out."
            )
        raise UserError(f"{path}: cannot be decompressed ({str(error).removesuffix('.')}). {advice}") from None


class DataFile:
    """A file that stays open.

    Raises: UserError for one that cannot be read, is a pipe, a device or a Git LFS pointer, or changes.
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
        """From here on read what comes out of the compressed file; raises UserError as `decompressed` does."""
        content = decompressed(self.path, self.file)
        self.check()
        self.file.close()
        self.file = content
        self.state = self._state()

    def chunks(self) -> Iterator[bytes]:
        """The content from the first byte on, some of it at a time."""
        self.file.seek(0)
        while True:
            try:
                part = self.file.read(CHUNK)
            except OSError as error:
                raise UserError(
                    f"{self.path}: cannot be read ({error.strerror}). Look at its disk, or give a copy."
                ) from None
            if not part:
                break
            yield part
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
        digest = hashlib.file_digest(self.file, "sha256").hexdigest()
        self.check()
        return digest

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self.file.fileno())
        return found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Raise UserError if the file is another than it was when it was opened."""
        if self._state() != self.state:
            raise UserError(
                f"{self.path}: was changed while it was read. Start again when nothing writes to it, or give a copy."
            )


class LineIndex:
    """The lines of a file that are not blank, each as (its first byte, the byte behind its end, its number from 1).

    fingerprint: SHA-256 of the file's content, as hexadecimal digits.
    Raises: UserError where there is no room for the temporary file, and for a file that changes.
    """

    def __init__(self, file: DataFile):
        self._content, self._doubtful = hashlib.sha256(), array("q")
        try:
            with tempfile.TemporaryFile() as kept:
                for starts in self._starts(file):
                    kept.write(starts.astype(np.int64).tobytes())
                # A map keeps a descriptor, of which a process has a thousand, and a folder may have as many files.
                small = kept.tell() <= SMALL_INDEX
                kept.seek(0)  # which also writes what is in its buffer
                borders = np.frombuffer(kept.read(), np.int64) if small else np.memmap(kept, np.int64, "r")
        except OSError as error:
            raise UserError(
                f"{file.path}: its lines cannot be noted in a temporary file ({error.strerror or error}). Set TMPDIR "
                "to a folder where there is room: 8 bytes a line are needed."
            ) from None
        self._borders = np.asarray(borders)  # where each line begins, and the last one ends
        self.fingerprint = self._content.hexdigest()
        blank = [line for line in self._doubtful if file.read(*self._borders[line : line + 2].tolist()).isspace()]
        lines = len(self._borders) - 1
        self._numbers = np.delete(np.arange(lines), blank) if blank else range(lines)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        line = int(self._numbers[index])
        start, end = self._borders[line : line + 2].tolist()
        return start, end, line + 1

    def _starts(self, file: DataFile) -> Iterator[np.ndarray]:
        """The first byte of each line, and at last the file's end; notes the lines that begin as blank ones do."""
        begins, size, lines = True, 0, 0  # whether the next byte begins a line
        for part in file.chunks():
            self._content.update(part)
            codes = np.frombuffer(part, np.uint8)
            starts = np.flatnonzero(codes == ord("\n")) + 1
            ended = len(starts) > 0 and bool(starts[-1] == len(codes))
            starts = np.concatenate([[0] * begins, starts[: len(starts) - ended]]).astype(np.int64)
            self._doubtful.extend((lines + np.flatnonzero(IS_BLANK[codes[starts]])).tolist())
            yield starts + size
            begins, size, lines = ended, size + len(codes), lines + len(starts)
        yield np.array([size])


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
            return len(self) == 0 or bool(self[0])
        except UserError:
            return False


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a value of a column that is not read. why: what the column holds, as messages have it."""

    why: str


class ArrowRecords:
    """The records of an Arrow table: of a Parquet file, or of a `datasets.Dataset`. `name` is what messages call it.

    Values are read as they are stored, and nothing is decoded: an image or a recording is a column of bytes, which is
    not read. Maps become dicts, and texts of Arrow's type json what they stand for. A value that cannot be read is an
    `Unread`, which is a mistake only where it is asked for.
    """

    def __init__(self, table: pyarrow.Table, unread: dict[str, Unread], name: str, fingerprint: str):
        """unread: `unread_columns` of the file or data set, whether the table holds them or not."""
        self.size, self.unread, self.name, self.fingerprint = len(table), unread, name, fingerprint
        self.types = {field.name: field.type for field in table.schema if field.name not in unread}
        self.json = {column for column, kind in self.types.items() if any(map(_is_json, _within(kind)))}
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
            # No UTF-8 (a ValueError), no JSON, a time that Python has no date for, a map with a key twice.
            return Unread(f"what cannot be read ({_reason(error)})")


def unread_columns(schema: pyarrow.Schema) -> dict[str, Unread]:
    """The columns of a table that are not read: those of bytes, and of maps whose keys are no texts."""
    found = {}
    for field in schema:
        if any(map(_is_bytes, _within(field.type))):
            found[field.name] = Unread(f"bytes (of the type {quoted(str(field.type))[1:-1]})")
        elif any(types.is_map(kind) and not _is_text(kind.key_type) for kind in _within(field.type)):
            found[field.name] = Unread(f"a map whose keys are no texts (of the type {quoted(str(field.type))[1:-1]})")
    return found


def _within(kind: pyarrow.DataType) -> Iterator[pyarrow.DataType]:
    """The type and all types that it is made of."""
    yield kind
    parts = [kind.value_type] if types.is_dictionary(kind) else [kind.field(n).type for n in range(kind.num_fields)]
    for part in parts:
        yield from _within(part)


def _is_bytes(kind: pyarrow.DataType) -> bool:
    return any(
        test(kind)
        for test in (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    )


def _is_text(kind: pyarrow.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _is_json(kind: pyarrow.DataType) -> bool:
    return isinstance(kind, pyarrow.JsonType)


def _decoded_json(value, kind: pyarrow.DataType):
    """A value of this type with its texts of the type json decoded."""
    if value is None:
        return None
    if _is_json(kind):
        return json.loads(value)
    if types.is_struct(kind):
        return {field.name: _decoded_json(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return {key: _decoded_json(item, kind.item_type) for key, item in value.items()}
    return [_decoded_json(item, kind.value_type) for item in value] if hasattr(kind, "value_type") else value


def read_records(path: str | Path) -> Records:
    """The records of a .jsonl, .json, .csv or .parquet file, possibly none; it may be compressed (.jsonl.gz, .csv.zst).

    A .json file holds a list of objects, or objects one behind the other, like a .jsonl one a line or spread over
    lines. Raises UserError, with the file and the line, for what cannot be read; for a line of a .jsonl file when its
    record is asked for.
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
    _refuse_compressed(path, file.read(0, 8))
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


def _refuse_compressed(path: Path, beginning: bytes) -> None:
    """Raise UserError for content, after what the file's name says was undone, that is still compressed."""
    for ending, pattern in BEGINNINGS.items():
        if re.match(pattern, beginning):
            kind = COMPRESSIONS[ending]
            raise UserError(
                f"{path}: holds {kind} data inside of {COMPRESSIONS[compression(path)]} data. Decompress it once."
                if compression(path)
                else f"{path}: holds {kind} data. Call it {path.name}{ending}, or decompress it."
            )


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
        raise _no_json(path, text, error) from None
    if not isinstance(records, list):
        raise UserError(
            f"{path}, line 1: found {described(records)}; a .json file is a list of objects. Put the records into [ ]."
        )
    return [(f"{path}, record {number}", record) for number, record in enumerate(records, start=1)]


def _json_objects(path: Path, text: str) -> list[tuple[str, object]]:
    """(where, record) of objects that stand one behind the other, each spread over lines as it may be."""
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
        table = mapped_parquet(file.file, columns, str(file.path), largest_content(file.file))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file.path}: found no Parquet that can be read ({_reason(error)}). Write it again.") from None
    file.check()  # what was hashed is what was read
    return ArrowRecords(table, unread, str(file.path), fingerprint)


def check_text(where: str, column: str, value: object, may_be_blank: bool = False) -> None:
    """Raise UserError, with the place and the column, unless the value is a text that a tokenizer takes."""
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
    if isinstance(value, Unread):
        return value.why
    name = type(value).__name__
    return f"{kinds.get(type(value), f'a value of type {name}')} ({quoted(json.dumps(value, default=str))})"


def quoted(text: str, limit: int = 60) -> str:
    """The text in quotes with control characters escaped, cut at `limit` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def _reason(error: Exception) -> str:
    """A parser's complaint, shortened."""
    if isinstance(error, RecursionError):
        return "brackets within brackets, too deep"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return quoted(str(error).strip().split("\n")[0], 160)[1:-1]
