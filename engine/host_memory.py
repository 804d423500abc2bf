"""Controls what the C library does with host memory that a process has freed: keep it for the next tensor, or give it
back to the system. Copies tensors into one buffer of host memory."""

import contextlib
import ctypes
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP = (1 << 30, (1 << 31) - 1)
_GIVE_BACK = (1 << 17, 1 << 17)  # the library's default
_kept = False

COPIES_SHARE = 0.9
"""The largest share of the free host memory that the copies of the state for a checkpoint may take."""

RELEASED_EVERY = 20
"""Each time this number of training steps has passed, freed memory that the C library has kept is given back to the
system."""


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for the next tensor, as torch does on GPUs.

    Otherwise each large tensor gets new memory from the system, whose pages are cleared when they are first written.
    Clearing pages takes a twentieth of the time of a forward pass, and more in a backward pass.
    """
    global _kept
    _kept = _set(*_KEEP)


def release_freed_memory(step: int) -> None:
    """Give freed memory back after every RELEASED_EVERY-th step.

    The lengths of rows change from step to step, so freed memory is reused only in part. If freed memory were always
    kept, it would add up over thousands of steps. The cost of giving it back is that pages are cleared again in the
    next step.
    """
    if _kept and step % RELEASED_EVERY == 0:
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def releasing_freed_memory() -> Iterator[None]:
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


def room_of(tensors: Sequence[Tensor]) -> int:
    """The number of bytes that copies of the tensors take in a buffer."""
    return sum(map(_room, tensors))


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64  # each copy begins at a multiple of 64 bytes


def host_buffer(tensors: Sequence[Tensor]) -> Tensor:
    """Host memory for copies of the tensors, (bytes,) uint8. It is pinned if the tensors are on a GPU."""
    buffer = torch.empty(room_of(tensors), dtype=torch.uint8)
    if any(tensor.is_cuda for tensor in tensors):
        _pin(buffer)
    return buffer


def copies_in(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors, which use the buffer's memory. buffer: memory from `host_buffer`, large enough."""
    places = buffer[: room_of(tensors)].split([_room(tensor) for tensor in tensors])
    copies = [place[: own.nbytes].view(own.dtype).view(own.shape) for place, own in zip(places, tensors)]
    for copy, own in zip(copies, tensors):
        copy.copy_(own.detach(), non_blocking=True)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


def _pin(buffer: Tensor) -> None:
    """Pin memory, so that GPUs copy it faster. If the system does not allow it, the memory stays as it is.

    torch's `pin_memory` would take up to twice the memory, because it rounds sizes up to powers of two
    (aten/src/ATen/core/CachingHostAllocator.h).
    """
    cuda, address = torch.cuda.cudart(), buffer.data_ptr()
    if int(cuda.cudaHostRegister(address, buffer.nbytes, 0)) == 0:
        weakref.finalize(buffer.untyped_storage(), cuda.cudaHostUnregister, address).atexit = False
    else:
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")  # the next kernel raises CUDA's last error, and so removes it
