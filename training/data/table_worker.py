"""The process that decodes Parquet files of others; `training.data.files` starts it, with the files open.

It reads {"file": its descriptor, "copy": another, "columns": names, "limit": bytes} as JSON, and writes the columns to
the copy, as an Arrow stream. It answers {}, or what went wrong: {"too_large": true}, {"unreadable": in words}, or
{"no_room": in words}.

A kilobyte of Parquet may stand for gigabytes, of which neither its footer nor its pages need say anything before they
are decoded; and only a process can be given so much memory and no more. It imports nothing of ours.
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

MEMORY = 2 * 2**30  # bytes that this process may take, and TIMES the size of the file besides: its pages may be large
TIMES = 8
ROWS = (10_000, 100, 1)  # at once, and where these have no room


def copied(source: parquet.ParquetFile, copy: IO[bytes], columns: list[str], limit: int, rows: int) -> dict:
    """Write the columns, so many rows at once; what is answered."""
    schema = pyarrow.schema([source.schema_arrow.field(name) for name in columns])
    copy.seek(0)
    copy.truncate()
    with ipc.new_stream(copy, schema) as writer:  # a file of Arrow's may not change a column's dictionary
        for batch in source.iter_batches(rows, columns=columns, use_threads=False):  # each thread takes addresses
            if copy.tell() + batch.nbytes > limit:
                return {"too_large": True}
            writer.write_batch(batch)
    return {}


def main(file: int, copy: int, columns: list[str], limit: int) -> dict:
    """Try it with ever fewer rows at once; what is answered."""
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # others take addresses that they do not use
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most, (_, hard) = taken + MEMORY + TIMES * os.fstat(file).st_size, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    for rows in ROWS:
        try:
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
