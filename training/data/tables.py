"""Tokenised examples as Arrow tables, kept in a folder from one run to the next.

    table = cached_table(MadeTable(schema, examples), cache_folder(None), rows, tokenizer, kind="sft", max_length=512)

A file is named by a hash of all that it was made from, begins with a hash of all that it holds, and is written under
another name first: whoever sees it sees all of it. Tables are written a batch at a time and mapped into memory: no
process holds the rows of one, and the ranks of a machine share one copy. The folder may be deleted at any time.

One process at a time makes a table; the others of this machine, and of those that share the folder, wait (`alone`).
The first rank of a node reads the data; the others take its tables from the cache (`recorded`, `repeated`):

    with recorded() as found:                            # on the first rank
        examples = load()
    examples = repeated(load, found)                     # on another one: reads no data set

Of the rows themselves these have no need: how many there were and what they are known by is enough to find the table.
Where no cache can be written, each rank reads for itself.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from io import RawIOBase
from itertools import islice
from pathlib import Path
from typing import IO, NoReturn, TypeVar

import pyarrow

from engine.errors import UserError
from engine.files import os_errors

Item = TypeVar("Item")
FIRST, LAST = 15.0, 300.0  # seconds between lines, at the beginning and at most
LINES = 50  # between the two, a line for each such share of the time passed
EACH = 1000  # items between looks at the clock


def say(line: str) -> None:
    """Print the line on stderr, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts items that are gone through, and says how fast that goes and how long it will take.

    what: is done to the items. noun: what they are. told: called with each line beside `say`.
    """

    def __init__(
        self,
        total: int,
        what: str,
        noun: str = "rows",
        told: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.what, self.noun, self.told, self.clock = total, what, noun, told, clock
        self.done = 0
        self._started = clock()
        self._due = self._started + FIRST

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, counted as they are asked for."""
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
        line = (
            f"{self.what}: {self.done:,} of {self.total:,} {self.noun} ({self.done / self.total:.0%}), "
            f"{rate:,.0f} {self.noun}/s, {left} left"
        )
        say(line)
        self.told(line)


DIGEST = 64  # bytes of the hash at the beginning of a file; a multiple of 8 keeps Arrow's columns aligned
BATCH = 10_000  # examples that are put into Arrow's format at once
WORKER = Path(__file__).with_name("table_worker.py")


class Unwritten(Exception):
    """A file that could not be written. error: why; size: bytes of it that were there by then."""

    def __init__(self, error: OSError, size: int = 0):
        super().__init__(str(error))
        self.error, self.size = error, size


class MadeTable:
    """A table that is made while it is written: what `examples(counts)` yields, tuples of one value a column.

    counts: filled by `examples`; the table's metadata once all of it is made.
    """

    def __init__(self, schema: pyarrow.Schema, examples: Callable[[Counter], Iterable[tuple]]):
        self.schema, self.examples = schema, examples
        self.counts: Counter = Counter()

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        """The table's rows, made anew each time."""
        self.counts = Counter()
        remaining = iter(self.examples(self.counts))
        while some := list(islice(remaining, BATCH)):
            columns = [pyarrow.array(column, field.type) for column, field in zip(zip(*some), self.schema)]
            yield pyarrow.record_batch(columns, schema=self.schema)

    @property
    def metadata(self) -> dict[str, str]:
        """The counts as Arrow's metadata."""
        return {name: str(count) for name, count in self.counts.items()}


class _Hashed:
    """A file, hashed as it is written; without a buffer, in which what found no room would wait and fail again."""

    closed = False

    def __init__(self, file: RawIOBase):
        self.file, self.hash, self.size = file, hashlib.sha256(), 0

    def write(self, content: bytes) -> int:
        self.hash.update(content)
        rest = memoryview(content)
        while rest:
            try:
                written = self.file.write(rest)
            except OSError as error:
                raise Unwritten(error, self.size) from None
            self.size, rest = self.size + written, rest[written:]
        return len(content)

    def flush(self) -> None:
        """Nothing: what is written need not be on the disk before the end."""

    close = flush


def write_table(made: MadeTable, path: Path) -> None:
    """Write the table at the path, unless another process has just done it; raises Unwritten."""
    temporary = path.with_name(
        f"{begun_here(path)}{uuid.uuid4().hex}.tmp"
    )  # not tempfile's, which are one user's alone
    size = 0
    try:
        with temporary.open("xb", buffering=0) as file:
            size = _write(made, file)
            os.fsync(file.fileno())
        if read_table(path) is None:
            temporary.replace(path)
    except OSError as error:
        raise Unwritten(error, size) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def begun_here(path: Path) -> str:
    """How the names of unfinished files begin that processes of this host write for the path."""
    return f"{path.stem}.{socket.gethostname()}."


def _write(made: MadeTable, file: RawIOBase) -> int:
    """Write the hash and the table, its counts beside a last batch that is empty; returns the size."""
    file.write(bytes(DIGEST))
    body = _Hashed(file)
    with pyarrow.ipc.new_file(pyarrow.PythonFile(body, "w"), made.schema) as writer:
        for batch in made.batches():
            writer.write_batch(batch)
        last = pyarrow.RecordBatch.from_pylist([], schema=made.schema)
        writer.write_batch(last, custom_metadata=made.metadata)
    try:
        file.seek(0)
        file.write(body.hash.hexdigest().encode())
    except OSError as error:
        raise Unwritten(error, body.size) from None
    return DIGEST + body.size


def read_table(path: Path) -> pyarrow.Table | None:
    """The table of a file, mapped into memory; None if there is no such file, or if it is damaged."""
    try:
        with path.open("rb") as file:
            digest = file.read(DIGEST)
            if (
                hashlib.file_digest(file, "sha256").hexdigest().encode() != digest
            ):  # read, not mapped: maps count as ours
                return None
        with pyarrow.memory_map(str(path)) as mapped:
            return _table(mapped.read_buffer())
    except (OSError, pyarrow.ArrowInvalid):  # ArrowInvalid: the file is shorter than it was a moment ago
        return None


def _table(content: pyarrow.Buffer) -> pyarrow.Table:
    reader = pyarrow.ipc.open_file(content.slice(DIGEST))
    counts = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1).custom_metadata
    return reader.read_all().replace_schema_metadata(counts)


def unnamed_table(made: MadeTable) -> pyarrow.Table:
    """The table in a temporary file without a name, which is gone with the process; raises UserError without room."""
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            _write(made, file)
            return _table(_mapped(file))
    except (OSError, Unwritten) as problem:
        raise _no_room(problem) from None


def mapped_parquet(file: IO[bytes], columns: list[str], name: str, limit: int) -> pyarrow.Table:
    """These columns of a Parquet file, in a temporary file without a name: in Parquet itself no row can be found.

    limit: bytes that they may have when they are decoded.

    Raises: UserError, by the file's name, for what becomes far larger than data are, and without room;
    pyarrow.ArrowException for what cannot be read.
    """
    with tempfile.TemporaryFile(buffering=0) as copy:
        decode_apart(file, copy.fileno(), columns, name, limit)
        return pyarrow.ipc.open_stream(_mapped(copy)).read_all()


def decode_apart(file: IO[bytes], copy: int | None, columns: list[str], name: str, limit: int) -> None:
    """Have a process with a limit of memory decode the file, to the descriptor `copy`; raises as `mapped_parquet`."""
    asked = json.dumps({"file": file.fileno(), "copy": copy, "columns": columns, "limit": limit}).encode()
    files = [file.fileno()] + ([] if copy is None else [copy])
    done = subprocess.run([sys.executable, "-P", str(WORKER)], input=asked, capture_output=True, pass_fds=files)
    said = json.loads(done.stdout.splitlines()[-1] if done.stdout else '{"unreadable": "it takes Python down with it"}')
    if "unreadable" in said:
        raise pyarrow.ArrowInvalid(said["unreadable"])
    if "no_room" in said:
        raise _no_room(Unwritten(OSError(said["no_room"]), said["size"]))
    if said:
        raise UserError(
            f"{name}: becomes more than {limit >> 20:,} MB when it is decoded, or needs more memory than data do. "
            "If it is what you mean, write it as .jsonl and give that."
        )


def _mapped(file: RawIOBase) -> pyarrow.Buffer:
    return pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _no_room(problem: OSError | Unwritten) -> UserError:
    error, size = (problem.error, problem.size) if isinstance(problem, Unwritten) else (problem, 0)
    return UserError(
        f"{tempfile.gettempdir()}: a temporary file of data cannot be written ({error.strerror or error}), behind "
        f"{size / 1e6:,.0f} MB of it. Set TMPDIR to a folder where there is room."
    )


Result = TypeVar("Result")


class NotHandedOver(Exception):
    """Rows, or the table made of them, that are asked for where only what they are known by is there."""


@dataclass(frozen=True, slots=True)
class KnownRows(Sequence):
    """Rows that another rank has read; see `Rows` of rows.py."""

    size: int
    fingerprint: str

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index) -> NoReturn:
        raise NotHandedOver


@dataclass
class Found:
    """What was read: the rows, in the order in which they were asked for. kept: whether all tables are in the cache."""

    rows: list[tuple[KnownRows, ...]] = field(default_factory=list)
    kept: bool = True


_recording: Found | None = None
_remaining: list[tuple[KnownRows, ...]] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[Found]:
    """Note what is read while the block runs."""
    global _recording
    _recording = found = Found()
    try:
        yield found
    finally:
        _recording = None


def repeated(load: Callable[[], Result], found: Found | None) -> Result:
    """`load()`, in which all rows are those that were found, if they were kept; otherwise all is read again."""
    global _remaining
    if found is None or not found.kept:
        return load()
    _remaining = list(found.rows)
    try:
        return load()
    except NotHandedOver:  # the cache is not one that this rank sees, or was emptied meanwhile
        pass
    finally:
        _remaining = None
    return load()


def handed_over(read: Callable[..., tuple[Sequence, ...]]) -> Callable[..., tuple[Sequence, ...]]:
    """`read`, which gives the rows that were handed over, where some were, and notes what it reads, where asked to."""

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


def note_unkept() -> None:
    """Note that a table is in no cache: other ranks have to make it."""
    if _recording is not None:
        _recording.kept = False


BETWEEN = 0.2  # seconds between two tries

_held: dict[int, str] = {}  # by descriptor, who holds the lock


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Hold the lock of this path while the block runs, when nobody else does; says whether it is held.

    Now and then a line says whom this process waits for, and how far that one is. Raises: Unwritten where no file can
    be made there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path)
    except OSError as error:
        raise Unwritten(error) from None
    try:
        yield descriptor is not None
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if descriptor is not None:
            _held.pop(descriptor, None)
            os.close(descriptor)


def note(line: str) -> None:
    """Write into the locks that this process holds how far it is."""
    for descriptor, who in _held.items():
        with contextlib.suppress(OSError):
            content = json.dumps([who, line]).encode()
            os.ftruncate(descriptor, os.pwrite(descriptor, content, 0))


def _locked(path: Path) -> int | None:
    """The descriptor of the file that is locked; None where the file system has no locks."""
    due, started = time.monotonic() + FIRST, time.monotonic()
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):  # and not one that its holder has removed meanwhile
                _held[descriptor] = f"process {os.getpid()} on {socket.gethostname()}"
                note("")
                return descriptor
            os.close(descriptor)
            continue
        except BlockingIOError:
            os.close(descriptor)
        except OSError:  # no locks here
            os.close(descriptor)
            return None
        if time.monotonic() >= due:
            now = time.monotonic()
            due = now + min(max((now - started) / 10, FIRST), LAST)
            say(_waiting(path))
        time.sleep(BETWEEN)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _waiting(path: Path) -> str:
    try:
        who, line = json.loads(path.read_text())
    except (OSError, ValueError):
        who, line = "another process", ""
    return f"waiting for {who}, which tokenises the same data ({path}){f'; {line}' if line else ''}"


IDS = pyarrow.large_list(pyarrow.int32())  # a column of token ids
FORMAT = 5  # to be raised when the same rows are to become other tables, or these other files
DAY = 86_400  # seconds
LARGE = 2**28  # bytes; a table that found no room is not made again elsewhere if so much of it was there


def cache_folder(given: str | None) -> Path:
    """The folder given, or else the user's own: four-engine-rlhf in $XDG_CACHE_HOME or ~/.cache."""
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "four-engine-rlhf"


def cache_key(rows, tokenizer, **settings) -> str:
    """A hash over the rows (their `fingerprint`, or themselves if they are a list), the tokenizer and the settings."""
    content = getattr(rows, "fingerprint", None) or json.dumps(list(rows), default=str)
    versions = {"format": FORMAT, **{name: version(name) for name in ("transformers", "tokenizers")}}
    parts = [content, tokenizer_hash(tokenizer), json.dumps({**versions, **settings}, sort_keys=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.lru_cache(maxsize=4)
def tokenizer_hash(tokenizer) -> str:
    """A hash of all that the tokenizer would save, chat template included, except how it last padded and cut.

    It is made once, as a tokenizer is not changed after it was read.
    """
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


def cached_table(made: MadeTable, folder: Path | None, rows, tokenizer, **settings) -> pyarrow.Table:
    """The table that was made from the same rows, tokenizer and settings before, or else a new one, which is kept.

    One process makes it; others that want the same one at the same time wait for that. Without a folder, or where it
    cannot be written (one line says so), the table is in a temporary file of this process alone.

    Raises: UserError where a large table finds no room.
    """
    if folder is None:
        return _unkept(made, rows)
    path = folder / f"{cache_key(rows, tokenizer, **settings)}.arrow"
    table = read_table(path)
    if table is not None:
        return table
    if isinstance(rows, KnownRows):
        raise NotHandedOver
    try:
        with alone(path.with_suffix(".lock")) as held:
            table = read_table(path)  # another process may have made it meanwhile
            if table is None:
                older = folder / f"{cache_key(rows, tokenizer, format=FORMAT - 1, **settings)}.arrow"
                if older.exists():
                    say(f"the same data were tokenised by an earlier version ({older}), and are tokenised anew")
                _remove_unfinished(path, held)
                write_table(made, path)
                table = read_table(path)
    except Unwritten as problem:
        told = f"{folder} cannot be written ({problem.error.strerror})"
        if problem.size > LARGE:
            raise UserError(
                f"tokenised data are not kept: {told}, behind {problem.size / 1e6:,.0f} MB of {path.name}. Make room "
                "there, or give another --data_output_path."
            ) from None
        say(f"warning: tokenised data are not kept: {told}; give another --data_output_path")
    return _unkept(made, rows) if table is None else table


def _unkept(made: MadeTable, rows) -> pyarrow.Table:
    if isinstance(rows, KnownRows):
        raise NotHandedOver
    note_unkept()
    return unnamed_table(made)


def _remove_unfinished(path: Path, held: bool) -> None:
    """Remove what killed runs left half written: what this host began of this file at once, if its lock is held; all
    else a day later, since a file system may keep locks on one host from others, where the file is being written."""
    for file in path.parent.glob("*.tmp"):
        with contextlib.suppress(OSError):  # another process was quicker
            if (held and file.name.startswith(begun_here(path))) or file.stat().st_mtime < time.time() - DAY:
                file.unlink()


def ids_at(table: pyarrow.Table, column: str, index: int) -> list[int]:
    """The token ids of one example."""
    return table[column][index].values.to_numpy().tolist()


def count_of(table: pyarrow.Table, name: str) -> int:
    """What was counted under this name when the table was built; 0 if nothing was."""
    return int(table.schema.metadata.get(name.encode(), 0))
