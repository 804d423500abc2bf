"""Atomic writes: a file or folder exists completely or not at all, even if the process is killed or the machine stops.
This file also writes safetensors files one tensor at a time. Such a file is byte by byte equal to the file that the
safetensors library would write, but the library needs all tensors in memory at once.
"""

import contextlib
import ctypes
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PARTIAL, OLD = ".partial", ".old"
"""Endings of folder names, for a folder that is being written and for the earlier folder that it replaces."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file. It replaces an earlier file or link only after all its content is on the disk.

    Raises: OSError. In this case the earlier file is unchanged.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # mode "x" does not follow links
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make the system write a file, or the names in a folder, to the disk (fsync). Some file systems do not support
    this call for folders, and do not need it. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Call `sync` for a folder and everything in it. Raises: OSError."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if not path.is_symlink():
            sync(path)
    sync(folder)


def remove_folder(path: Path) -> None:
    """Remove a folder and its contents, if it exists. If the path is a link, only the link is removed. Raises:
    OSError."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Within this context a new folder beside `folder` is filled; it gets the name at the end, or is removed.

    `folder` must not exist or be empty. A process that is killed leaves FOLDER.PID.partial. Raises: OSError.
    """
    partial = folder.with_name(f"{folder.name}.{os.getpid()}{PARTIAL}")
    remove_folder(partial)  # of a killed process with the same number, as in containers
    try:
        partial.mkdir(parents=True)
        yield partial
        sync_tree(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync(folder.parent)


def exchange(new: Path, place: Path) -> Path | None:
    """Move the folder `new`, which is completely written and synced, to `place`. Returns the new path of the folder
    that was at `place` before, or None if there was none.

    At each instant `place` or `place`.old is a complete folder. Linux exchanges two names atomically. If the file
    system does not support this, the earlier folder is called `place`.old for an instant; if the process is killed in
    this instant, `restored` renames it back.

    Raises: OSError.
    """
    if not place.exists():
        new.replace(place)
        sync(place.parent)
        return None
    if _exchanged(new, place):
        sync(place.parent)
        return new
    old = place.with_name(place.name + OLD)
    remove_folder(old)
    place.replace(old)
    new.replace(place)
    sync(place.parent)
    return old


def restored(place: Path) -> bool:
    """Rename `place`.old, which remains if the process is killed within `exchange`, back to `place`. Returns whether
    there was such a folder."""
    old = place.with_name(place.name + OLD)
    if place.exists() or old.is_symlink() or not old.is_dir():
        return False
    old.replace(place)
    return True


def _exchanged(one: Path, other: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    return libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


# {dtype: the format's name}, in the order in which the library writes tensors: dtypes with a larger alignment come
# first.
DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES)}


def file_order(name: str, dtype: torch.dtype) -> tuple[int, str]:
    """The key by which the library sorts the tensors of a file."""
    return _RANKS[dtype], name


def write_safetensors(
    write: Callable[[bytes | memoryview], Any], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write the content of a safetensors file: the header, and then each tensor in the mapping's order. A tensor is
    fetched when it is written.

    write: a function that appends bytes to the file. tensors: {name: tensor}. If getting a tensor from the mapping
    would load it, the mapping should have a method `shape_and_dtype(name)`.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in tensors:
        shape, dtype = _shape_and_dtype(tensors, name)
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    write(len(text).to_bytes(8, "little") + text)
    for name in tensors:
        values = tensors[name].detach().to("cpu").contiguous()
        numbers: Any = values.view(-1).view(torch.uint8).numpy()
        write(memoryview(numbers))
        del values, numbers  # frees it before the next tensor is fetched


def _shape_and_dtype(tensors, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    if hasattr(tensors, "shape_and_dtype"):
        return tensors.shape_and_dtype(name)
    return tuple(tensors[name].shape), tensors[name].dtype
