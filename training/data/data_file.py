"""One data file, of which all that is read belongs to the same content.

    file = DataFile(path)
    for part in file.chunks(): ...
    file.read(start, end)                                    # bytes; UserError if the file was changed since

The file is read where a record is asked for and is not mapped into memory: reading behind the end of a mapped file that
was cut meanwhile kills the process.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from engine.errors import UserError
from engine.files import open_file
from engine.git_lfs import lfs_problem
from training.data.compressed import CHUNK, decompressed


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
        while part := self._next():
            yield part
        self.check()

    def _next(self) -> bytes:
        try:
            return self.file.read(CHUNK)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be read ({error.strerror}). Look at its disk, or give a copy."
            ) from None

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
