"""Arrow tables in files, written a batch at a time and mapped into memory, so that no process holds the rows of one.

    write_table(made, path)                              # begins with a hash of all that it holds
    table = read_table(path)

A file is written under another name and then renamed: whoever sees it sees all of it.
"""

import contextlib
import hashlib
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from io import RawIOBase
from itertools import islice
from pathlib import Path
from typing import IO

import pyarrow

from engine.errors import UserError
from engine.files import open_file

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
