"""Tokenised examples as Arrow tables, kept in a folder from one run to the next.

    table = cached_table(MadeTable(schema, examples), cache_folder(None), rows, tokenizer, kind="sft", max_length=512)

A file is named by a hash of all that it was made from. Tables are mapped into memory: the ranks of a machine share one
copy, and what is not looked at takes no memory. The folder may be deleted at any time.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import pyarrow

from engine.errors import UserError
from engine.files import os_errors
from training.data.build_lock import alone
from training.data.handover import KnownRows, NotHandedOver, note_unkept
from training.data.progress import say
from training.data.table_files import MadeTable, Unwritten, begun_here, read_table, unnamed_table, write_table

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
