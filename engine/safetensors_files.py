"""Safetensors files written a tensor at a time, byte by byte what the safetensors library writes of all at once."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# By the format's names, in the order in which the library writes them: what is aligned to more bytes comes first.
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
    """What the library sorts a file's tensors by."""
    return _RANKS[dtype], name


def write_safetensors(
    write: Callable[[bytes | memoryview], Any], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file's content: the header, and then each tensor in the mapping's order, fetched when its turn comes.

    write: appends all of what it is given. tensors: may have a method `shape_and_dtype(name)`, where asking for a
    tensor loads it.
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
