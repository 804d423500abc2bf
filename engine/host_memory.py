"""What the C library does with host memory that a process has freed: kept for the next tensor, or given back."""

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP = (1 << 30, (1 << 31) - 1)
_GIVE_BACK = (1 << 17, 1 << 17)  # as the library has it by itself
_kept = False

GIVEN_BACK_EVERY = 20
"""Steps of training after which freed memory that is kept goes back to the system, once."""


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next tensor, as torch does on GPUs.

    Otherwise each large tensor is new memory from the system, whose pages are cleared one by one as they are written:
    a twentieth of a forward pass, and more of a backward pass.
    """
    global _kept
    _kept = _set(*_KEEP)


def give_back_at(step: int) -> None:
    """Give freed memory back after every GIVEN_BACK_EVERY-th step.

    Rows come in ever new lengths, and of what was freed for some the next tensors fit into a part: kept for good, that
    adds up over thousands of steps. The pages that are wanted again are cleared anew, in the one step that follows.
    """
    if _kept and step % GIVEN_BACK_EVERY == 0:
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Within this context the system gets the memory of each large tensor back at once, and at its end all that is
    free: what is needed once, to load a model or to save it, is then not held for ever after."""
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
    if not hasattr(libc, "mallopt"):  # which is glibc's
        return False
    libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
    libc.mallopt(_M_TRIM_THRESHOLD, trim_threshold)
    return True
