"""The program of a process that decodes tables from unknown sources. `training.data.files` opens the files and starts
the process.

The program reads JSON from its standard input: {"file": descriptor of the file, "copy": descriptor to write to or null,
"columns": names, "limit": bytes}. With a copy, the file is a Parquet file, whose columns are written to the copy as an
Arrow stream. Without a copy, the file is an Arrow stream, and the program only checks how large it is when decoded. The
program prints {} or an error: {"too_large": true}, {"unreadable": text}, or {"no_room": text}.

A kilobyte of Parquet may decode to gigabytes, and neither the file's footer nor its pages tell the decoded size
beforehand. A memory limit can be set for a process only; therefore a separate process decodes. The program imports
nothing of this project.
"""

import errno
import json
import os
import resource
import sys
from pathlib import Path
from typing import IO

import pyarrow
from pyarrow import ipc, parquet

MEMORY = 2 * 2**30  # the process may take MEMORY + TIMES * size of the file, in bytes: a file's pages may be large
TIMES = 8
ROWS = (10_000, 100, 1)  # numbers of rows that are decoded at once; if memory does not suffice, the next one is tried


def copied(source: parquet.ParquetFile, copy: IO[bytes], columns: list[str], limit: int, rows: int) -> dict:
    """Write these columns to `copy`, `rows` rows at a time; returns what the program prints."""
    schema = pyarrow.schema([source.schema_arrow.field(name) for name in columns])
    copy.seek(0)
    copy.truncate()
    with ipc.new_stream(copy, schema) as writer:  # Arrow's file format does not let a column's dictionary change
        for batch in source.iter_batches(rows, columns=columns, use_threads=False):  # threads take address space
            if copy.tell() + batch.nbytes > limit:
                return {"too_large": True}
            writer.write_batch(batch)
    return {}


def measured(file: int, limit: int) -> dict:
    """Check how large an Arrow stream is when decoded; returns what the program prints. Parts of the stream that are
    not compressed are not even read."""
    with pyarrow.memory_map(f"/proc/self/fd/{file}") as content:
        for batch in ipc.open_stream(content, options=ipc.IpcReadOptions(use_threads=False)):
            limit -= batch.nbytes
            if limit < 0:
                return {"too_large": True}
    return {}


def main(file: int, copy: int | None, columns: list[str], limit: int) -> dict:
    """Decode the file, with ever fewer rows at a time until memory suffices; returns what the program prints."""
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # other pools reserve address space that they do not use
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most, (_, hard) = taken + MEMORY + TIMES * os.fstat(file).st_size, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    for rows in ROWS:
        try:
            if copy is None:
                return measured(file, limit)
            with open(file, "rb", closefd=False) as source, open(copy, "r+b", buffering=0, closefd=False) as target:
                return copied(parquet.ParquetFile(source), target, columns, limit, rows)
        except MemoryError:
            continue
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return {"no_room": os.strerror(error.errno)}
            return {"unreadable": str(error)}
    return {"too_large": True}


if __name__ == "__main__":
    print(json.dumps(main(**json.load(sys.stdin))))
