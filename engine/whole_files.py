"""Atomic writes: files and folders are there whole or not at all, even if the process is killed or the machine stops.
Also safetensors files written one tensor at a time, byte by byte the same as those of the safetensors library, which
takes all tensors at once.
"""

import contextlib
import ctypes
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PARTIAL, OLD = ".partial", ".old"
"""Endings of a folder's name: what is being written to take its place, and what stood there, on its way out."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file. It replaces an earlier file or link only when all of it is on the disk.

    Raises: OSError; the earlier file is then unchanged.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # does not follow links
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
    """Have the system write a file, or the names in a folder, to the disk (fsync). Some file systems have no such call
    for folders, and need none. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` for a folder and everything in it; raises OSError."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if not path.is_symlink():
            sync(path)
    sync(folder)


def remove_folder(path: Path) -> None:
    """Remove a folder and its contents, if it exists; of a link only the link. Raises: OSError."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def exchange(new: Path, place: Path) -> Path | None:
    """Move the folder `new`, which is written and synced, to `place`; returns the new path of the folder that was
    there.

    At each instant one of the names is a whole folder. Linux exchanges two names atomically. Where the file system
    cannot, the earlier folder is called `place`.old for an instant, which `restored` undoes after a kill.

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
    """Rename `place`.old, which a kill within `exchange` has left, back to `place`; returns whether there was one."""
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


# By the format's names, in the order in which the library writes them: dtypes with a larger alignment come first.
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
    """The key that the library sorts a file's tensors by."""
    return _RANKS[dtype], name


def write_safetensors(
    write: Callable[[bytes | memoryview], Any], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file's content: the header, and then each tensor in the mapping's order, fetched when its turn comes.

    write: appends bytes to the file. tensors: may have a method `shape_and_dtype(name)`, if getting a tensor would load
    it.
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
        del values, numbers  # before the next is fetched


def _shape_and_dtype(tensors, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    if hasattr(tensors, "shape_and_dtype"):
        return tensors.shape_and_dtype(name)
    return tuple(tensors[name].shape), tensors[name].dtype
