"""The machines that a run uses: how much memory their GPUs and hosts have, and how much of it tensors cannot use."""

import re
from dataclasses import dataclass

from engine.errors import UserError, nearest_names
from engine.gpus import NCCL

# The number of bytes of each GPU that CUDA reports (torch.cuda.mem_get_info), which is less than the GPU's name says.
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
OLD = ("v100", "t4")  # the GPUs above that are older than Ampere, and have no bf16
CONTEXT = 900_000_000
"""The number of bytes that the CUDA context, kernels, and cuBLAS's workspaces take."""
FRAGMENTS = 0.04
"""A fraction of the planned bytes: the memory that torch's allocator holds but cannot use, because its free blocks have
other sizes."""

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12}
_UNITS |= {"tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def gpu_bytes(name: str) -> int:
    """The number of bytes of a GPU. name: a name in GPUS, or a number of bytes ("80000000000", "80GB", "79.1GiB").

    Raises: UserError if the name is unknown (the message lists similar names), or if the number is too small for a GPU.
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
    """The number of bytes that a text such as 512GB, 79.1 GiB or 80000000000 states; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        return None
    return round(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines that a run uses.

    gpus: the number of GPUs in each node.
    gpu: the number of bytes of one GPU, or None if it is not known.
    host: the number of bytes of a node's host memory, or None if it is not known.
    on_gpu: whether the ranks compute on GPUs. If they do not, device memory is host memory.
    old: whether the GPUs are older than Ampere, for which torch has no kernel for rows of various lengths.
    """

    gpus: int = 1
    nodes: int = 1
    gpu: int | None = None
    host: int | None = None
    on_gpu: bool = True
    old: bool = False

    @property
    def kernel(self) -> bool:
        """Whether torch has a kernel for rows of various lengths on these machines, in 16 bits."""
        return self.on_gpu and not self.old

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.gpus * self.nodes

    @property
    def reserved(self) -> int:
        """The number of bytes of a GPU that the CUDA context and, with several ranks, NCCL's buffers take."""
        return CONTEXT + (NCCL if self.world > 1 else 0)

    @property
    def room(self) -> int | None:
        """The number of bytes that the tensors of a rank can take on its device; None if it is not known."""
        if self.on_gpu:
            return None if self.gpu is None else self.gpu - self.reserved
        return None if self.host is None else self.host // self.gpus
