"""What is printed, which must not end a run: the pipe behind it may be gone, and the disk that a log goes to full."""

import contextlib
import os
import sys


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
