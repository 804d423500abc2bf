"""Whether the C library keeps host memory that a process has freed for the next tensor, or gives it back to the
system."""

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP = (1 << 30, (1 << 31) - 1)
_GIVE_BACK = (1 << 17, 1 << 17)  # the library's default
_kept = False

GIVEN_BACK_EVERY = 20
"""Steps of training after which freed memory that is kept goes back to the system, once."""


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next tensor, as torch does on GPUs.

    Otherwise each large tensor gets new memory from the system, whose pages are cleared when they are first written.
    This takes a twentieth of a forward pass, and more of a backward pass.
    """
    global _kept
    _kept = _set(*_KEEP)


def give_back_at(step: int) -> None:
    """Give freed memory back after every GIVEN_BACK_EVERY-th step.

    Rows have ever new lengths, so freed memory is reused only in part; if it were always kept, it would add up over
    thousands of steps. The cost is that pages are cleared anew in the one step that follows.
    """
    if _kept and step % GIVEN_BACK_EVERY == 0:
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Within this context the memory of a large tensor goes back to the system as soon as it is freed, and at the end
    all free memory does. So memory that is needed only once, to load or save a model, is not kept."""
    global _kept
    kept, _kept = _kept, False
    if kept:
        _set(*_GIVE_BACK)
    try:
        yield
    finally:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        if kept:
            keep_freed_memory()


def _set(mmap_threshold: int, trim_threshold: int) -> bool:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # only glibc has it
        return False
    libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
    libc.mallopt(_M_TRIM_THRESHOLD, trim_threshold)
    return True
