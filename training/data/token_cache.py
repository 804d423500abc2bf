"""Caches tokenised examples as Arrow tables in a folder, for later runs.

    table = cached_table(MadeTable(schema, examples), cache_folder(None), rows, tokenizer, kind="sft", max_length=512)

The name of a table's file is a hash of everything that the table was made from, and the file begins with a hash of its
content. A file is written under another name and then renamed, so that no process sees an incomplete file. Tables are
written in batches of rows and mapped into memory: no process holds a whole table, and the ranks of a machine share one
copy. The folder may be deleted at any time.

The first rank of a node reads the data; the other ranks take the first rank's tables from the cache (`recorded`,
`repeated`):

    with recorded() as found:                            # on the first rank
        examples = load()
    examples = repeated(load, found)                     # on the other ranks: reads no data set

The other ranks do not need the rows themselves: the number of rows and their fingerprint suffice to find the table. If
the cache cannot be written, each rank reads the data itself.
"""

import contextlib
import functools
import hashlib
import json
import mmap
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import IO, NoReturn, TypeVar

import pyarrow

from engine.errors import UserError
from engine.files import os_errors

Item = TypeVar("Item")
Result = TypeVar("Result")
FIRST, LAST = 15.0, 300.0  # smallest and largest number of seconds between progress lines
LINES = 50  # within these limits, the time between two lines is 1 / LINES of the time that has passed since the start
EACH = 1000  # the clock is read once in EACH items
DIGEST = 64  # bytes of the hash at the beginning of a file; a multiple of 8 keeps Arrow's columns aligned
BATCH = 10_000  # number of examples that are converted to Arrow's format at once
IDS = pyarrow.large_list(pyarrow.int32())  # a column of token ids
FORMAT = 6  # version of tables and files; raise it when the code makes other tables of the same rows, or other files
DAY = 86_400  # seconds


class MadeTable:
    """A table whose rows are made while it is written. `examples(counts)` yields the rows, as tuples with a value for
    each column.

    counts: `examples` fills this Counter; when the whole table is made, it becomes the table's metadata.
    """

    def __init__(self, schema: pyarrow.Schema, examples: Callable[[Counter], Iterable[tuple]]):
        self.schema, self.examples = schema, examples
        self.counts: Counter = Counter()

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        """The table's rows in batches. Each call makes the rows anew."""
        self.counts = Counter()
        remaining = iter(self.examples(self.counts))
        while some := list(islice(remaining, BATCH)):
            columns = [pyarrow.array(column, field.type) for column, field in zip(zip(*some), self.schema)]
            yield pyarrow.record_batch(columns, schema=self.schema)

    @property
    def metadata(self) -> dict[str, str]:
        """The counts as Arrow's metadata."""
        return {name: str(count) for name, count in self.counts.items()}


def cache_folder(given: str | None) -> Path:
    """The folder `given`; by default the user's cache folder: four-engine-rlhf in $XDG_CACHE_HOME or ~/.cache."""
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "four-engine-rlhf"


def cached_table(made: MadeTable, folder: Path | None, rows, tokenizer, **settings) -> pyarrow.Table:
    """The table for these rows, tokenizer and settings. It is read from the cache; if it is not there, it is made from
    `made` and written to the cache.

    Without a folder, or if the folder cannot be written (a printed line says so), the table is kept in a temporary file
    that only this process sees. Raises: UserError if there is no room for the temporary file.
    """
    path = folder / f"{cache_key(rows, tokenizer, **settings)}.arrow" if folder else None
    table = read_table(path) if path else None
    if table is None and isinstance(rows, KnownRows):
        raise NotHandedOver
    if table is None and path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_unfinished(folder)
            write_table(made, path)
            table = read_table(path)
        except OSError as error:
            say(
                f"warning: tokenised data are not kept: {folder} cannot be written ({error.strerror or error}); give "
                "another --data_output_path"
            )
    if table is not None:
        return table
    if _recording is not None:
        _recording.kept = False
    try:
        with tempfile.TemporaryFile() as file:
            _write(made, file)
            return _table(mapped(file))
    except OSError as error:
        raise no_room(error.strerror or str(error)) from None


def _remove_unfinished(folder: Path) -> None:
    """Remove incomplete files that are older than a day, which killed runs have left. A running process may still be
    writing a younger one."""
    for file in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):  # another process has removed the file
            if file.stat().st_mtime < time.time() - DAY:
                file.unlink()


def cache_key(rows, tokenizer, **settings) -> str:
    """A hash of the rows, the tokenizer and the settings. The rows enter by their `fingerprint`; if they are a list,
    by their content."""
    content = getattr(rows, "fingerprint", None) or json.dumps(list(rows), default=str)
    versions = {"format": FORMAT, **{name: version(name) for name in ("transformers", "tokenizers")}}
    parts = [content, tokenizer_hash(tokenizer), json.dumps({**versions, **settings}, sort_keys=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.lru_cache(maxsize=4)
def tokenizer_hash(tokenizer) -> str:
    """A hash of everything that the tokenizer would save, its chat template included. The hash ignores the padding and
    truncation settings of the tokenizer's last call. The hash is computed once for each tokenizer, since a tokenizer
    does not change after it is loaded."""
    try:
        folder = tempfile.TemporaryDirectory()
        with os_errors():
            tokenizer.save_pretrained(folder.name)
    except OSError as error:
        raise UserError(
            f"the tokenizer cannot be written into a temporary folder ({error.strerror or error}). Set TMPDIR to "
            "a folder where there is room."
        ) from None
    total = hashlib.sha256()
    with folder:
        for file in sorted(file for file in Path(folder.name).rglob("*") if file.is_file()):
            content = file.read_bytes()
            if file.name == "tokenizer.json":
                content = json.dumps(json.loads(content) | {"padding": None, "truncation": None}).encode()
            total.update(f"{file.name} {len(content)}\n".encode() + content)
    return total.hexdigest()


def ids_at(table: pyarrow.Table, column: str, index: int) -> list[int]:
    """The token ids of the example at `index`, from this column of the table."""
    return table[column][index].values.to_numpy().tolist()


def count_of(table: pyarrow.Table, name: str) -> int:
    """The count `name` from the table's metadata; 0 if the metadata do not have it."""
    return int(table.schema.metadata.get(name.encode(), 0))


def write_table(made: MadeTable, path: Path) -> None:
    """Write the table to `path`, unless another process has just written it. Raises: OSError."""
    temporary = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.tmp")  # tempfile's are readable by one user only
    try:
        with temporary.open("x+b") as file:
            _write(made, file)
            os.fsync(file.fileno())
        if read_table(path) is None:
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write(made: MadeTable, file: IO[bytes]) -> None:
    """Write the hash of the content, then the content: the table's batches, and a last, empty batch with the counts."""
    file.write(bytes(DIGEST))
    with pyarrow.ipc.new_file(pyarrow.PythonFile(file, "w"), made.schema) as writer:
        for batch in made.batches():
            writer.write_batch(batch)
        last = pyarrow.RecordBatch.from_pylist([], schema=made.schema)
        writer.write_batch(last, custom_metadata=made.metadata)
    file.seek(DIGEST)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    file.write(digest.encode())
    file.flush()


def read_table(path: Path) -> pyarrow.Table | None:
    """The table of a file, mapped into memory; None if there is no such file, or if it is damaged."""
    try:
        with path.open("rb") as file:
            digest = file.read(DIGEST)
            found = hashlib.file_digest(file, "sha256")  # read, not mapped: mapped pages count as this process's
            if found.hexdigest().encode() != digest:
                return None
        with pyarrow.memory_map(str(path)) as content:
            return _table(content.read_buffer())
    except (OSError, pyarrow.ArrowInvalid):  # ArrowInvalid: the file has just been truncated
        return None


def _table(content: pyarrow.Buffer) -> pyarrow.Table:
    reader = pyarrow.ipc.open_file(content.slice(DIGEST))
    counts = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1).custom_metadata
    return reader.read_all().replace_schema_metadata(counts)


def mapped(file: IO[bytes]) -> pyarrow.Buffer:
    """The content of the file, mapped into memory. No other process may write to the file."""
    return pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def no_room(reason: str) -> UserError:
    """The UserError for a temporary file that could not be written. reason: the system's words."""
    return UserError(
        f"{tempfile.gettempdir()}: a temporary file of data cannot be written ({reason}). Set TMPDIR to a folder where "
        "there is room."
    )


class NotHandedOver(Exception):
    """Raised if only the rows' fingerprint is known, but a row is needed, or a table is not in the cache."""


@dataclass(frozen=True, slots=True)
class KnownRows(Sequence):
    """Stands for `Rows` (row_selection.py) that another rank has read: their number and their fingerprint."""

    size: int
    fingerprint: str

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index) -> NoReturn:
        raise NotHandedOver


@dataclass
class Found:
    """What the first rank has read. rows: stand-ins for its results of `load_rows`, in the order of the calls. kept:
    whether all its tables are in the cache."""

    rows: list[tuple[KnownRows, ...]] = field(default_factory=list)
    kept: bool = True


_recording: Found | None = None
_remaining: list[tuple[KnownRows, ...]] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[Found]:
    """Record which rows are read while the block runs; yields the record."""
    global _recording
    _recording = found = Found()
    try:
        yield found
    finally:
        _recording = None


def repeated(load: Callable[[], Result], found: Found | None) -> Result:
    """Call `load()`, which gets the rows that another rank has `found` and reads their tables from the cache. If a
    table is not in the cache, `load()` is called again and reads the data itself."""
    global _remaining
    if found is None or not found.kept:
        return load()
    _remaining = list(found.rows)
    try:
        return load()
    except NotHandedOver:  # this rank does not see the cache, or the cache was emptied meanwhile
        pass
    finally:
        _remaining = None
    return load()


def handed_over(read: Callable[..., tuple[Sequence, ...]]) -> Callable[..., tuple[Sequence, ...]]:
    """Wrap a function that reads rows. Within `repeated`, the wrapped function returns the rows that another rank has
    read; within `recorded`, it records its result."""

    @functools.wraps(read)
    def rows(*args, **options):
        if _remaining is not None:
            if not _remaining:
                raise NotHandedOver
            return _remaining.pop(0)
        parts = read(*args, **options)
        if _recording is not None:
            _recording.rows.append(tuple(KnownRows(len(part), part.fingerprint) for part in parts))
        return parts

    return rows


def say(line: str) -> None:
    """Print the line on stderr, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts items as they are processed, and prints the speed and the time left.

    what: what is done to the items, in words. noun: what the items are called.
    """

    def __init__(self, total: int, what: str, noun: str = "rows", clock: Callable[[], float] = time.monotonic):
        self.total = total
        self.what = what
        self.noun = noun
        self.clock = clock
        self.done = 0
        self._started = clock()
        self._due = self._started + FIRST

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, and count each when it is asked for."""
        for item in items:
            yield item
            self.done += 1
            if self.done % EACH == 0 and self.clock() >= self._due:
                self._line()

    def _line(self) -> None:
        passed = self.clock() - self._started
        self._due = self.clock() + min(max(passed / LINES, FIRST), LAST)
        rate = self.done / passed
        left = timedelta(seconds=round((self.total - self.done) / rate))
        say(
            f"{self.what}: {self.done:,} of {self.total:,} {self.noun} ({self.done / self.total:.0%}), "
            f"{rate:,.0f} {self.noun}/s, {left} left"
        )
