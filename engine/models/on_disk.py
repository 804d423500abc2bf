"""The tensors of a weight file, each read by pieces when it is copied.

To fill a model with the weights of a file, transformers has all of them at once in a dictionary. With these in it the
process that reads holds a piece of one tensor at a time, and neither a copy nor a mapping of the file.
"""

import contextlib
import json
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import modeling_utils

from engine import safetensors_files
from engine.lazy import Lazy

PIECE = 1 << 24  # bytes read at a time
# Those of weights, by safetensors' names; tensors of others are left to the libraries.
DTYPES = {name: dtype for dtype, name in safetensors_files.DTYPES.items() if dtype.is_floating_point}


@contextlib.contextmanager
def read_by_pieces() -> Iterator[None]:
    """Within this context the dictionaries that transformers reads from weight files hold `Lazy` tensors."""
    read = modeling_utils.load_state_dict

    def load_state_dict(checkpoint_file, map_location="cpu", **settings):
        state = read(checkpoint_file, map_location=map_location, **settings)
        return state if torch.device(map_location).type == "meta" else state | tensors_of(Path(checkpoint_file))

    modeling_utils.load_state_dict = load_state_dict
    try:
        yield
    finally:
        modeling_utils.load_state_dict = read


def tensors_of(file: Path) -> dict[str, Lazy]:
    """Those weights of a safetensors file, or of one by torch.save, that can be read by pieces."""
    if file.suffix == ".safetensors":
        return _of_safetensors(file)
    return _of_pickle(file) if zipfile.is_zipfile(file) else {}  # not of torch before 1.6


def _of_safetensors(file: Path) -> dict[str, Lazy]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {
        name: _at(file, 8 + length + entry["data_offsets"][0], entry["shape"], DTYPES[entry["dtype"]])
        for name, entry in header.items()
        if entry.get("dtype") in DTYPES
    }


def _of_pickle(file: Path) -> dict[str, Lazy]:
    with FakeTensorMode():  # in which torch.load reads no numbers, and says where they stand
        state = torch.load(file, map_location="cpu", weights_only=True)
    found: dict[str, Lazy] = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.dtype in DTYPES.values() and tensor.is_contiguous():
            start: Any = tensor.untyped_storage()._checkpoint_offset
            offset = start + int(tensor.storage_offset()) * tensor.dtype.itemsize
            found[name] = _at(file, offset, tensor.shape, tensor.dtype)
    return found


def _at(file: Path, offset: int, shape, dtype: torch.dtype) -> Lazy:
    return Lazy.of(tuple(shape), dtype, partial(_read, file, offset, dtype))


def _read(file: Path, offset: int, dtype: torch.dtype, target: Tensor) -> None:
    """Copy the numbers that stand from a byte of a file on to a contiguous tensor; raises OSError where it ends."""
    if not target.numel():
        return
    with file.open("rb", buffering=0) as opened:
        opened.seek(offset)
        for run in target.view(-1).split(PIECE // dtype.itemsize):
            piece = torch.empty(len(run), dtype=dtype)
            numbers: Any = piece.view(torch.uint8).numpy()
            rest = memoryview(numbers)
            while len(rest):
                count = opened.readinto(rest)
                if not count:
                    raise OSError(f"{file} ends within a tensor. Was its writing cut off? Copy it again.")
                rest = rest[count:]
            run.copy_(piece)
