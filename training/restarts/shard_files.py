"""Runs of named tensors' numbers in safetensors files: written a run at a time, read by name and place.

A key is name@start: the run's first number has this place in the flattened tensor. The shapes of whole tensors stand in
the files' metadata. Reading is the safetensors library's; writing is not, because the hash of a file is to be that of
the numbers in memory and not of what the disk made of them, and no second copy of them is wanted.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import UserError
from engine.json_objects import parsed
from engine.safetensors_files import DTYPES, write_safetensors
from engine.zero.shards import Shard

CHUNK = 1 << 24  # bytes written at a time


class FileRecord(NamedTuple):
    """What a manifest says of a file: its size in bytes, and the BLAKE2b hash of what it is to hold."""

    size: int
    blake2b: str


class _HashedFile:
    """A new file that is hashed as it is written, and is on the disk when it has been closed by `finish`."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._hash, self._size = path.open("xb", buffering=0), hashlib.blake2b(), 0

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        view = memoryview(data)
        self._hash.update(view)
        self._size += len(view)
        while len(view):
            view = view[self._file.write(view[:CHUNK]) :]

    def finish(self) -> FileRecord:
        """Have the disk hold it."""
        os.fsync(self._file.fileno())
        return FileRecord(self._size, self._hash.hexdigest())


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a new small file to the disk."""
    with _HashedFile(path) as file:
        file.write(data)
        return file.finish()


def write_shards(path: Path, shards: Sequence[Shard]) -> FileRecord:
    """Write these runs as a new safetensors file to the disk; values on a device are fetched one after the other."""
    runs = {f"{shard.name}@{shard.start}": shard.values for shard in shards if shard.values.numel()}
    shapes = {shard.name: shard.shape for shard in shards}
    return write_tensors(path, runs, {"shapes": json.dumps(shapes)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write a new safetensors file to the disk, a tensor at a time: iterating may load each when its turn comes."""
    with _HashedFile(path) as file:
        write_safetensors(file.write, tensors, metadata)
        return file.finish()


class _Run(NamedTuple):
    start: int
    end: int
    file: object
    key: str


class ShardFiles:
    """The numbers that the files in a folder hold together; a `ShardSource`.

    Raises: UserError where there are no such files, or one is none that `write_shards` wrote.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._runs: dict[str, list[_Run]] = defaultdict(list)
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise UserError(f"{folder}: no restart point's numbers are there. Give a whole restart point.")
        for path in paths:
            try:
                self._open(path)
            except (SafetensorError, KeyError, ValueError, AttributeError) as error:
                raise UserError(f"{path}: no file of a restart point ({error}). Use another restart point.") from None
        for runs in self._runs.values():
            runs.sort(key=lambda run: run.start)

    def _open(self, path: Path) -> None:
        file = safe_open(str(path), framework="pt", device="cpu")
        shapes = parsed(file.metadata()["shapes"])
        self._shapes.update({name: tuple(shape) for name, shape in shapes.items()})
        for key in file.keys():
            name, _, start = key.rpartition("@")
            (length,) = file.get_slice(key).get_shape()
            self._runs[name].append(_Run(int(start), int(start) + length, file, key))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shape of each tensor, by its name."""
        return self._shapes

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (n,), of any device, with the numbers start .. start+n of the named tensor.

        Raises: UserError where the files do not hold all of them.
        """
        place, end = start, start + out.numel()
        for run in self._runs.get(name, ()):
            if run.start <= place < run.end:
                until = min(run.end, end)
                values = run.file.get_slice(run.key)[place - run.start : until - run.start]
                out[place - start : until - start].copy_(values)
                place = until
            if place == end:
                return
        if place < end:
            raise UserError(
                f"{self.folder}: holds no numbers {place} to {end} of {name}. The restart point is of another model."
            )

    def whole(self, name: str) -> Tensor:
        """The full tensor of this name, in host memory."""
        shape, runs = self._shapes[name], self._runs[name]
        tensor = torch.empty(shape, dtype=self.dtype(name))
        if runs:
            self.read(name, 0, tensor.view(-1))
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """What the numbers of a tensor are kept in."""
        by_name = {text: dtype for dtype, text in DTYPES.items()}
        run = self._runs[name][0]
        return by_name[run.file.get_slice(run.key).get_dtype()]
