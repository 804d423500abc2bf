"""Where the lines of a data file stand: eight bytes a line, of many in a temporary file that is mapped into memory.

lines = LineIndex(file)
start, end, number = lines[0]                            # bytes of the first line that is not blank, and its number
"""

import hashlib
import tempfile
from array import array
from collections.abc import Iterator

import numpy as np

from engine.errors import UserError
from training.data.data_file import DataFile

NEWLINE = ord("\n")
SMALL = 2**20  # bytes of an index that is kept in memory
IS_BLANK = np.isin(np.arange(256), list(b" \t\n\r\x0b\x0c"))  # by byte, as bytes.isspace has it


class LineIndex:
    """The lines of a file that are not blank, each as (its first byte, the byte behind its end, its number from 1).

    fingerprint: SHA-256 of the file's content, as hexadecimal digits.
    Raises: UserError where there is no room for the temporary file, and for a file that changes.
    """

    def __init__(self, file: DataFile):
        self._content, self._doubtful = hashlib.sha256(), array("q")
        try:
            with tempfile.TemporaryFile() as kept:
                for starts in self._starts(file):
                    kept.write(starts.astype(np.int64).tobytes())
                # A map keeps a descriptor, of which a process has a thousand, and a folder may have as many files.
                small = kept.tell() <= SMALL
                kept.seek(0)  # which also writes what is in its buffer
                borders = np.frombuffer(kept.read(), np.int64) if small else np.memmap(kept, np.int64, "r")
        except OSError as error:
            raise UserError(
                f"{file.path}: its lines cannot be noted in a temporary file ({error.strerror or error}). Set TMPDIR "
                "to a folder where there is room: 8 bytes a line are needed."
            ) from None
        self._borders = np.asarray(borders)  # where each line begins, and the last one ends
        self.fingerprint = self._content.hexdigest()
        blank = [line for line in self._doubtful if file.read(*self._borders[line : line + 2].tolist()).isspace()]
        lines = len(self._borders) - 1
        self._numbers = np.delete(np.arange(lines), blank) if blank else range(lines)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        line = int(self._numbers[index])
        start, end = self._borders[line : line + 2].tolist()
        return start, end, line + 1

    def _starts(self, file: DataFile) -> Iterator[np.ndarray]:
        """The first byte of each line, and at last the file's end; notes the lines that begin as blank ones do."""
        begins, size, lines = True, 0, 0  # whether the next byte begins a line
        for part in file.chunks():
            self._content.update(part)
            codes = np.frombuffer(part, np.uint8)
            starts = np.flatnonzero(codes == NEWLINE) + 1
            ended = len(starts) > 0 and bool(starts[-1] == len(codes))
            starts = np.concatenate([[0] * begins, starts[: len(starts) - ended]]).astype(np.int64)
            self._doubtful.extend((lines + np.flatnonzero(IS_BLANK[codes[starts]])).tolist())
            yield starts + size
            begins, size, lines = ended, size + len(codes), lines + len(starts)
        yield np.array([size])
