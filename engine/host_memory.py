"""Controls what the C library does with host memory that a process has freed: keep it for the next tensor, or give it
back to the system."""

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP = (1 << 30, (1 << 31) - 1)
_GIVE_BACK = (1 << 17, 1 << 17)  # the library's default
_kept = False

COPIES_SHARE = 0.9
"""The largest share of the free host memory that the copies of the state for a checkpoint may take."""

GIVEN_BACK_EVERY = 20
"""Each time this number of training steps has passed, freed memory that the C library has kept is given back to the
system."""


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for the next tensor, as torch does on GPUs.

    Otherwise each large tensor gets new memory from the system, whose pages are cleared when they are first written.
    Clearing pages takes a twentieth of the time of a forward pass, and more in a backward pass.
    """
    global _kept
    _kept = _set(*_KEEP)


def give_back_at(step: int) -> None:
    """Give freed memory back after every GIVEN_BACK_EVERY-th step.

    The lengths of rows change from step to step, so freed memory is reused only in part. If freed memory were always
    kept, it would add up over thousands of steps. The cost of giving it back is that pages are cleared again in the
    next step.
    """
    if _kept and step % GIVEN_BACK_EVERY == 0:
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Within this context the memory of a large tensor is given back to the system as soon as it is freed; at the end
    of the context all free memory is given back. Memory that is needed only once, to load or save a model, is thus not
    kept."""
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
