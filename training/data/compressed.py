"""Compressed data files, decompressed into temporary files that have no name.

A record is read where it stands, and within a compressed stream nothing can be found again. Each process has a copy of
its own in $TMPDIR, which is gone with the process, however that ends; nothing is written beside the data.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import IO

import pyarrow

from engine.errors import UserError, shortened
from engine.files import open_file
from training.data.table_files import decode_apart

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # by ending, as Arrow calls them
BEGINNINGS = {".gz": rb"\x1f\x8b", ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"}  # the last: a frame to skip
LARGEST_RATIO = 200  # of texts and tables; the same few bytes over and over give 1,000 and more
ALWAYS_ALLOWED = 2**28  # bytes, whatever the ratio
CHUNK = 2**20  # bytes


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
    _check_beginning(path, file)
    limit, size = largest_content(file), 0
    again = os.fdopen(os.dup(file.fileno()), "rb")  # for the stream, which closes it
    again.seek(0)
    stream = pyarrow.CompressedInputStream(again, COMPRESSIONS[compression(path)])
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


def _check_beginning(path: Path, file: IO[bytes]) -> None:
    beginning = file.read(8)
    if beginning and not re.match(BEGINNINGS[compression(path)], beginning):
        kind = COMPRESSIONS[compression(path)]
        raise UserError(
            f"{path}: begins with {shortened(beginning)}, which no {kind} file does. Take {path.suffix} off its name "
            "if it is not compressed, or fetch it again."
        )


def refuse_compressed(path: Path, beginning: bytes) -> None:
    """Raise UserError for content, after what the file's name says was undone, that is still compressed."""
    for ending, pattern in BEGINNINGS.items():
        if re.match(pattern, beginning):
            kind = COMPRESSIONS[ending]
            raise UserError(
                f"{path}: holds {kind} data inside of {COMPRESSIONS[compression(path)]} data. Decompress it once."
                if compression(path)
                else f"{path}: holds {kind} data. Call it {path.name}{ending}, or decompress it."
            )


def _next_part(path: Path, file: IO[bytes], stream: pyarrow.CompressedInputStream) -> bytes:
    try:
        return stream.read(CHUNK)
    except (OSError, pyarrow.ArrowException) as error:
        advice = "Was its writing or fetching cut off? Write or fetch it again."
        if compression(path) == ".gz" and _is_padded(file):
            advice = (
                "It ends in zeros: filled up, as on tapes, or not written to its end. Decompress it with `gzip -dc`, "
                "which tells the two apart, and give what comes out."
            )
        raise UserError(f"{path}: cannot be decompressed ({str(error).removesuffix('.')}). {advice}") from None


def _is_padded(file: IO[bytes]) -> bool:
    """Whether it ends in more zeros than a gzip member does, of which an empty one has 9."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), 16, max(0, size - 16)) == bytes(16)
