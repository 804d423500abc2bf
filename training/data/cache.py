"""Tokenised examples as Arrow tables, in memory or kept in a folder from one run to the next.

    table = cached_table(build, cache_folder(None), rows, tokenizer, kind="sft", max_length=512)

A file is named by a hash of all that it was made from and begins with a hash of all that it holds. It is written under
another name and then renamed, so that processes that build the same table at once never read an unfinished file. Files
are mapped into memory: the ranks of a machine share one copy. The folder may be deleted at any time.
"""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import pyarrow

from engine.errors import UserError
from engine.files import os_errors

IDS = pyarrow.large_list(pyarrow.int32())  # a column of token ids
FORMAT = 3  # to be raised when the same rows are to become other tables
DIGEST = 64  # bytes of the hash at the beginning of a file; a multiple of 8 keeps Arrow's columns aligned
DAY = 86_400  # seconds
BATCH = 10_000  # examples that are put into Arrow's format at once


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


def tokenizer_hash(tokenizer) -> str:
    """A hash of all that the tokenizer would save, chat template included, except how it last padded and cut."""
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


def cached_table(build: Callable[[], pyarrow.Table], folder: Path | None, rows, tokenizer, **settings) -> pyarrow.Table:
    """The table that was built from the same rows, tokenizer and settings before, or else a new one, which is kept.

    Without a folder, or where it cannot be written (one line says so), the table stays in memory.
    """
    if folder is None:
        return build()
    path = folder / f"{cache_key(rows, tokenizer, **settings)}.arrow"
    table = read_table(path)
    if table is not None:
        return table
    table = build()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)
        write_table(table, path)
    except OSError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(
                f"warning: tokenised data are not kept: {folder} cannot be written ({error.strerror}); give another "
                "--data_output_path",
                file=sys.stderr,
                flush=True,
            )
        return table
    return read_table(path) or table


def read_table(path: Path) -> pyarrow.Table | None:
    """The table of a file, mapped into memory; None if there is no such file, or if it is damaged."""
    try:
        with pyarrow.memory_map(str(path)) as file:
            content = file.read_buffer()
    except (OSError, pyarrow.ArrowInvalid):  # ArrowInvalid: the file is empty
        return None
    if len(content) < DIGEST:
        return None
    body = content.slice(DIGEST)
    if content.slice(0, DIGEST).to_pybytes() != _digest(body):
        return None
    return pyarrow.ipc.open_file(body).read_all()


def write_table(table: pyarrow.Table, path: Path) -> None:
    """Write the table at the path, unless another process has just done it; raises OSError."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    body = sink.getvalue()
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")  # not tempfile's, which nobody else may read
    try:
        with temporary.open("xb") as file:
            file.write(_digest(body))
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        if read_table(path) is None:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_unfinished(folder: Path) -> None:
    """Remove what runs that were killed left half written, a day ago or more."""
    for file in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):  # another process was quicker
            if file.stat().st_mtime < time.time() - DAY:
                file.unlink()


def _digest(body) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def table_of(schema: pyarrow.Schema, examples: Callable[[Counter], Iterable[tuple]]) -> pyarrow.Table:
    """What `examples(counts)` yields, tuples of one value a column, as a table; `counts` becomes its metadata."""
    counts, batches = Counter(), []
    remaining = iter(examples(counts))
    while some := list(islice(remaining, BATCH)):
        columns = [pyarrow.array(column, field.type) for column, field in zip(zip(*some), schema)]
        batches.append(pyarrow.record_batch(columns, schema=schema))
    metadata = {name: str(count) for name, count in counts.items()}
    return pyarrow.Table.from_batches(batches, schema).replace_schema_metadata(metadata)


def ids_at(table: pyarrow.Table, column: str, index: int) -> list[int]:
    """The token ids of one example."""
    return table[column][index].values.to_numpy().tolist()


def count_of(table: pyarrow.Table, name: str) -> int:
    """What was counted under this name when the table was built; 0 if nothing was."""
    return int(table.schema.metadata.get(name.encode(), 0))
