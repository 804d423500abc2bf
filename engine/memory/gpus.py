"""GPUs by name, and how much of one tensors can have."""

import re

from engine.errors import UserError, nearest_names

# Bytes that CUDA says such a GPU has (torch.cuda.mem_get_info), which are fewer than its name says.
GPUS = {
    "v100-16g": 16_900_000_000,
    "v100-32g": 34_080_000_000,
    "a10-24g": 23_690_000_000,
    "a100-40g": 42_500_000_000,
    "a100-80g": 84_980_000_000,
    "a40-48g": 47_800_000_000,
    "a6000-48g": 51_000_000_000,
    "h100-80g": 84_980_000_000,
    "h100-94g": 99_900_000_000,
    "h200": 150_110_000_000,
    "b200": 191_500_000_000,
    "l4-24g": 23_660_000_000,
    "l40s": 47_800_000_000,
    "t4-16g": 15_640_000_000,
    "rtx-3090": 25_430_000_000,
    "rtx-4090": 25_390_000_000,
    "rtx-5090": 33_660_000_000,
}
CONTEXT = 900_000_000
"""Bytes of the CUDA context, of kernels, and of cuBLAS's workspaces."""
NCCL = 600_000_000
"""Bytes of NCCL's channels, where there are several ranks."""
FRAGMENTS = 0.04
"""Of the planned bytes: what torch's allocator holds and cannot use, as its blocks are of other sizes."""

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12}
_UNITS |= {"tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def gpu_bytes(name: str) -> int:
    """The bytes of a GPU that is called so, in GPUS or as a number of bytes ("80000000000", "80GB", "79.1GiB").

    Raises: UserError that tells near names, and for a number that no GPU has so few bytes of.
    """
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    if key in GPUS:
        return GPUS[key]
    shortened = [known for known in GPUS if known.split("-")[0] == key]
    if len(shortened) == 1:
        return GPUS[shortened[0]]
    size = parsed_bytes(name)
    if size is not None and 0 < size < CONTEXT:
        raise UserError(
            f"--gpu {name} is {size} bytes, less than CUDA itself takes of a GPU. Give its memory with a unit, as 24GB "
            "or 23.6GiB, or a name, as a100-40g."
        )
    if size:
        return size
    near = " or ".join(shortened or nearest_names(key, list(GPUS)))
    meant = f" Did you mean {near}?" if near else ""
    raise UserError(
        f"--gpu {name}: neither a GPU that is known nor a number of bytes (24GB, 23.6GiB).{meant} Known: "
        f"{', '.join(GPUS)}."
    )


def parsed_bytes(text: str) -> int | None:
    """Bytes of a text such as 512GB, 79.1 GiB or 80000000000; None for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        return None
    return round(float(match[1]) * _UNITS[match[2]])


def reserved(world: int) -> int:
    """Bytes of a GPU that are no tensors', whatever is planned."""
    return CONTEXT + (NCCL if world > 1 else 0)
