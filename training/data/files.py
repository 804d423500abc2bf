"""Reads the records of .jsonl, .json, .csv and .parquet files, also compressed ones (COMPRESSIONS).

    records = read_records("reviews/sft.jsonl")
    where, record = records[0]                               # "reviews/sft.jsonl, line 1", {"text": "..."}

Each record comes with its place in the file, for messages. The loaders of the `datasets` library are not used, because
they give no line numbers, guess types (a text that looks like a date becomes a date), and keep cached copies that they
recognise by the file's time stamp.

A record is parsed when it is asked for, because parsed records may take a hundred times the memory of their text. Files
are not mapped into memory: if a mapped file is truncated, a read beyond its new end kills the process. Compressed files
and Parquet files give no access to a single record. Therefore their content is written once into a temporary file in
$TMPDIR. The temporary file has no name, so it vanishes when the process ends for any reason. A data file that changes
while it is used is refused.
"""

import bz2
import contextlib
import csv
import errno
import hashlib
import json
import lzma
import os
import re
import resource
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import pyarrow
from pyarrow import ipc, parquet, types

from engine.errors import UserError
from engine.files import lfs_problem, open_file
from training.data.token_cache import mapped, no_room

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}  # ending: name, Arrow's if Arrow reads it
DECOMPRESSORS = {"bz2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}  # Arrow fails on empty members of bz2
BEGINNINGS = {".gz": rb"\x1f\x8b", ".bz2": rb"BZh[1-9]1AY&", ".xz": rb"\xfd7zXZ\0", ".zst": rb"\x28\xb5\x2f\xfd"}
LARGEST_RATIO = 200  # limit of content size / compressed size: real data stay below, repeated bytes reach over 1,000
ALWAYS_ALLOWED = 2**26  # bytes of content that are allowed whatever the ratio
CHUNK = 2**20  # bytes
LONGEST_TEXT = 10_000_000  # characters; a tokenizer takes 20 seconds for them, and minutes and all memory for more
LONGEST_CELL = 2**31 - 1  # characters of a cell of a CSV file; the csv module's default limit is 131,072
BLANKS, COMMA, END = map(re.compile, (r"[ \t\r\n]*", r"[ \t\r\n]*,[ \t\r\n]*", r"[ \t\r\n]*\]?[ \t\r\n]*"))  # of JSON
LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+$")  # a line of CSV
NESTED = 100_000  # lists and objects that any JSON may have; each takes 30 times the memory of its two brackets
MEMORY = 2 * 2**30  # bytes that decoding a table may take, beside TIMES the file's size: a file's pages may be large
TIMES = 8
ROWS = 1000  # number of rows of a table that are decoded at once


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
            where = f"check the path (relative ones start from {Path.cwd()})"
            if re.search(r"#\d+$", path.name):  # ms-swift's number of rows
                where = "docs/from_ms_swift.md has a script that chooses rows"
            raise UserError(f"{path}: cannot be read ({error.strerror}); {where}.") from None
        self.limit = largest_content(self.file)
        self.state = self._state()

    def decompress(self) -> None:
        """Decompress the content into a temporary file, which replaces the compressed file in this object. The
        compressed file may have several members.

        Raises: UserError if the file is damaged or truncated, if its content is implausibly large, or if there is no
        room for the temporary file.
        """
        size = 0
        try:
            content = tempfile.TemporaryFile()  # noqa: SIM115
            for part in self._decompressed():
                size += len(part)
                if size > self.limit:
                    raise UserError(
                        f"{self.path}: becomes more than {LARGEST_RATIO} times as large when it is decompressed, which "
                        "data hardly do. If it is what you mean, decompress it and give what comes out."
                    )
                content.write(part)
            content.flush()
        except OSError as error:
            raise no_room(error.strerror) from None
        self.file = content
        self.state = self._state()

    def _decompressed(self) -> Iterator[bytes]:
        """The decompressed content in parts of at most CHUNK bytes. All decompression of data is here."""
        kind = COMPRESSIONS[compression(self.path)]
        try:
            if kind in DECOMPRESSORS:
                yield from _content(self.file, DECOMPRESSORS[kind])
            else:
                stream = pyarrow.CompressedInputStream(self.file, kind)
                yield from iter(lambda: stream.read(CHUNK), b"")
            self.check()  # the stream closes the file at its own end
        except (OSError, EOFError, lzma.LZMAError, pyarrow.ArrowException) as error:
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


def _content(file: IO[bytes], decompressor: Callable) -> Iterator[bytes]:
    """The decompressed content of a file in parts of at most CHUNK bytes. decompressor: a class of `bz2` or `lzma`. The
    files of these modules would end without an error where a second member is damaged. Raises: OSError, EOFError,
    lzma.LZMAError."""
    decoder, content = None, b""
    while content := content or file.read(2**16):  # what follows a member is copied
        decoder = decoder or decompressor()
        yield decoder.decompress(content, CHUNK)
        while not decoder.eof and not decoder.needs_input:
            yield decoder.decompress(b"", CHUNK)
        content, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
    if decoder:
        raise EOFError("Truncated compressed stream")


class RecordList:
    """The records of a text that is kept in memory. starts: where the records begin in it. record: a function of a
    record's number that gives (where, record)."""

    def __init__(self, starts: array, record: Callable[[int], tuple[str, object]], fingerprint: str):
        self.starts = starts
        self.record = record
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[str, object]:
        return self.record(range(len(self.starts))[index])


class JsonLines:
    """The records of a .jsonl file: one JSON value in each line; blank lines are skipped. Only a newline ends a line,
    because a JSON string may contain U+2028."""

    def __init__(self, file: DataFile):
        self.path = file.path
        self.file = file
        self.fingerprint = file.hash()
        self.starts, self.numbers = array("q"), array("I")  # of the lines that are not blank
        self.end = 0
        for number, line in enumerate(file.lines(), start=1):
            if not line.isspace():
                self.starts.append(self.end)
                self.numbers.append(number)
            self.end += len(line)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[str, object]:
        number, start = self.numbers[index], self.starts[index]
        end = self.starts[index + 1] if index + 1 < len(self) else self.end
        line = _decoded(self.path, self.file.read(start, end).partition(b"\n")[0], number)
        _check_brackets(f"{self.path}, line {number}", line)
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
        self.size = len(table)
        self.unread = unread
        self.name = name
        self.fingerprint = fingerprint
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
    file, ending = DataFile(path), data_ending(path)
    if ending not in ENDINGS:
        raise UserError(
            f"{path}: found the ending '{ending}{compression(path)}'; data files end in .jsonl (one JSON object a "
            "line), .json (a list of objects), .csv (with a line of column names) or .parquet, with "
            f"{', '.join(COMPRESSIONS)} behind it where they are compressed. Convert or rename the file."
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
        return _csv(path, _decoded(path, file.read()), file.hash())
    if ending == ".jsonl" or file.read(0, 4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{":
        lines = JsonLines(file)
        if ending == ".jsonl" or lines.begins_whole():
            return lines
    return _json(path, _decoded(path, file.read()), file.hash())


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


def _json(path: Path, text: str, fingerprint: str) -> RecordList:
    """The records of a .json file. A file that holds only blanks has none."""
    decode = json.JSONDecoder().raw_decode
    starts = array("q")
    place = BLANKS.match(text).end()
    is_list = text.startswith("[", place)
    between = COMMA if is_list else BLANKS
    _check_brackets(str(path), text)
    try:
        if not is_list and text[place : place + 1] not in ("", "{"):
            raise UserError(
                f"{path}, line 1: found {described(json.loads(text))}; a .json file is a list of objects. Put the "
                "records into [ ]."
            )
        place = BLANKS.match(text, place + is_list).end()
        while place < len(text) and not (is_list and not starts and text[place] == "]"):
            starts.append(place)
            place = decode(text, place)[1]
            if not (found := between.match(text, place)):
                break
            place = found.end()
        found = END.match(text, place)
        if is_list and (found.end() < len(text) or "]" not in found[0]):
            raise json.JSONDecodeError("Expecting ',' or the end of one list", text, found.end())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}, line {getattr(error, 'lineno', 1)}: found {quoted(_line(text, getattr(error, 'pos', 0)))}, which "
            f"is no JSON here ({_reason(error)}). Write one list of objects, or one object a line."
        ) from None

    def record(index: int) -> tuple[str, object]:
        return f"{path}, record {index + 1}", decode(text, starts[index])[0]

    return RecordList(starts, record, fingerprint)


def _check_brackets(where: str, text: str) -> None:
    """Raise UserError if a text of JSON has so many lists and objects that they would take far more memory than the
    text."""
    if text.count("[") + text.count("{") > NESTED + len(text) // 8:
        raise UserError(f"{where}: found more than {NESTED:,} lists and objects with hardly a text in them.")


def _line(text: str, place: int) -> str:
    """The line of the text at this place."""
    end = text.find("\n", place)
    return text[text.rfind("\n", 0, place) + 1 : end if end >= 0 else None]


def _csv(path: Path, text: str, fingerprint: str) -> RecordList:
    """The records of the lines below the header. An empty cell becomes None, since CSV cannot leave a value out."""
    csv.field_size_limit(LONGEST_CELL)
    starts = array("q")
    numbers = array("I")
    header = None
    place = 0
    start = 0
    number = 1

    def lines() -> Iterator[str]:
        nonlocal place
        for found in LINE.finditer(text):
            place = found.end()
            yield found[0]

    reader = csv.reader(lines(), strict=True)
    try:
        for cells in reader:
            where = f"{path}, line {number}"
            if cells and header is None:
                header = [cell.strip() for cell in cells]
                _check_names(where, header)
            elif cells:
                if len(cells) > len(header):
                    raise UserError(
                        f"{where}: found {len(cells)} cells in the {len(header)} columns {_named(header)}. "
                        "Put cells that hold commas or line breaks into double quotes."
                    )
                starts.append(start)
                numbers.append(number)
            start, number = place, reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {number}: found {quoted(_line(text, start))}, which is no CSV ({error}). Close each double "
            "quote, and double the quotes inside of cells."
        ) from None

    def record(index: int) -> tuple[str, object]:
        lines = (found[0] for found in LINE.finditer(text, starts[index]))
        cells = zip(header, next(csv.reader(lines, strict=True)))
        return f"{path}, line {numbers[index]}", {name: cell or None for name, cell in cells}

    return RecordList(starts, record, fingerprint)


def _check_names(where: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise UserError(f"{where}: found the column names {_named(names)}; each may occur once. Rename them.")


def _named(names: list[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _parquet(file: DataFile) -> ArrowRecords:
    """The records of a Parquet file. It is decoded into a temporary file, since Parquet gives no access to single
    rows."""
    fingerprint = file.hash()
    try:
        with tempfile.TemporaryFile() as copy, _limited(file.path, file.file, file.limit) as check:
            source = parquet.ParquetFile(file.file)
            schema = source.schema_arrow  # made anew at each access
            _check_names(str(file.path), schema.names)
            unread = unread_columns(schema)
            read = pyarrow.schema([field for field in schema if field.name not in unread])
            with ipc.new_stream(copy, read) as writer:  # Arrow's file format does not let a column's dictionary change
                for batch in source.iter_batches(ROWS, columns=read.names, use_threads=False):
                    check(batch)
                    writer.write_batch(batch)
            copy.flush()
            table = ipc.open_stream(mapped(copy)).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise no_room(os.strerror(error.errno)) from None
        raise UserError(f"{file.path}: found no Parquet that can be read ({_reason(error)}). Write it again.") from None
    file.check()  # the content that was hashed is the content that was read
    return ArrowRecords(table, unread, str(file.path), fingerprint)


def check_arrow(path: Path) -> None:
    """Check an Arrow stream, which may be compressed. Parts that are not compressed are not even read. Raises:
    UserError if its content is implausibly large; OSError for a pipe or device; pyarrow.ArrowException if the file
    cannot be read."""
    with (
        open_file(path) as file,
        pyarrow.memory_map(f"/proc/self/fd/{file.fileno()}") as content,
        _limited(path, file, largest_content(file)) as check,
    ):
        for batch in ipc.open_stream(content, options=ipc.IpcReadOptions(use_threads=False)):
            check(batch)


@contextlib.contextmanager
def _limited(path: Path, file: IO[bytes], limit: int) -> Iterator[Callable[[pyarrow.RecordBatch], None]]:
    """Limits what decoding a table takes. Yields a function that is called with each decoded batch.

    A kilobyte may decode to gigabytes in one row, and neither the file's footer nor its pages tell beforehand.
    Therefore the process may take only MEMORY + TIMES * size of the file more memory within this context. Raises:
    UserError if it would take more, or if the batches together have more than `limit` bytes.
    """
    total = 0
    pool = pyarrow.default_memory_pool()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = taken + MEMORY + TIMES * os.fstat(file.fileno()).st_size

    def check(batch: pyarrow.RecordBatch) -> None:
        nonlocal total
        total += batch.nbytes
        if total > limit:
            raise MemoryError

    try:
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # other pools reserve addresses that they do not use
        soft = min(each for each in (most, *limits) if each != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (soft, limits[1]))
        yield check
    except MemoryError:
        raise UserError(
            f"{path}: becomes more than {limit >> 20:,} MB when it is decoded, or needs more memory than data do. If "
            "it is what you mean, write it as .jsonl and give that."
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        pyarrow.set_memory_pool(pool)


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
        raise UserError(f"{where}, column {column}: {problem}. Correct the record or take it out.")


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
