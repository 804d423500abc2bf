"""What a process says: on a terminal or in a log, which must not end a run, and in the file that torchrun reports.

The pipe behind standard output may be gone, and the disk that a log is written to full: what is printed then is lost.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # in torchrun's environment of ranks


class Unfailing:
    """A stream whose write and flush never raise; what cannot be written is lost."""

    def __init__(self, stream):
        self.stream, self.lost = stream, False

    def write(self, text: str) -> int:
        """Write the text if that can be done."""
        try:
            return self.stream.write(text)
        except (OSError, ValueError):  # ValueError: it was closed
            self.lost = True
            return len(text)

    def flush(self) -> None:
        """Flush if that can be done."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            self.lost = True

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def keep_printing() -> None:
    """From here on nothing that is printed raises."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Unfailing):  # None: it was closed when the process began
            setattr(sys, name, Unfailing(stream))


def flush_all(code: int) -> None:
    """Flush what was printed; end the process with the code at once where some of it was lost, since Python's own end
    would try again and fail."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if any(getattr(stream, "lost", False) for stream in (sys.stdout, sys.stderr)):
        os._exit(code)


def harmless(text: str) -> str:
    """The text with what a terminal would obey as escapes (\\x1b), for what another process may have written."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def print_line(message: str) -> None:
    """Print on standard error, `harmless`, if somebody is there to read it."""
    with contextlib.suppress(OSError):
        print(harmless(message), file=sys.stderr, flush=True)


def write_error_file(message: str) -> None:
    """Have torchrun's report of a failure end with this message, in place of a link to its manual; without torchrun,
    nothing."""
    path = os.environ.get(ERROR_FILE)
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
