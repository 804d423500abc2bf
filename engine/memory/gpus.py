"""Properties of GPUs: arithmetic speed, memory bandwidth and links (from data sheets), memory sizes, and the number of
bytes that tensors cannot use.
"""

import re
from dataclasses import dataclass

from engine.errors import UserError, nearest_names


@dataclass(frozen=True, slots=True)
class Link:
    """A link between GPUs.

    bandwidth: bytes per second in one direction.
    latency: the number of seconds that one step from a GPU to the next takes.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class DataSheet:
    """Numbers from a GPU's data sheet.

    flops: floating-point operations per second on dense 16-bit matrices.
    bandwidth: bytes per second to and from the GPU's memory.
    link: the link to any other GPU of the node. PCIe cards have PCIe as their link, because NVLink bridges join only
        two or four cards.
    """

    flops: float
    bandwidth: float
    link: Link


# Latencies are the numbers by which NCCL chooses its algorithms: hwLat, for rings with LL128, in src/graph/tuning.cc of
# NVIDIA/nccl, 01afd20a77b5804e0ecf1042509dd9d20ebf9e93.
def _nvlink(both_ways: float) -> Link:
    """An NVLink link. both_ways: the bytes per second in both directions together, as in data sheets."""
    return Link(both_ways / 2, 1.9e-6)


def _pcie(generation: int) -> Link:
    """A PCIe link of this generation with 16 lanes."""
    return Link({3: 16e9, 4: 32e9, 5: 64e9}[generation], 2.5e-6)


# Keys are words of torch.cuda.get_device_name. A GPU has the first entry whose words all occur in its name. Source:
# NVIDIA's data sheets ("NVIDIA H200 Tensor Core GPU" and similar ones). From Ampere on, data sheets state twice the
# dense rate ("with sparsity").
DATA_SHEETS = {
    ("B200",): DataSheet(2250e12, 8000e9, _nvlink(1800e9)),
    ("H200", "NVL"): DataSheet(835e12, 4800e9, _pcie(5)),
    ("H200",): DataSheet(989e12, 4800e9, _nvlink(900e9)),
    ("H100", "NVL"): DataSheet(835e12, 3900e9, _pcie(5)),
    ("H100", "PCIE"): DataSheet(756e12, 2000e9, _pcie(5)),
    ("H100",): DataSheet(989e12, 3350e9, _nvlink(900e9)),  # SXM
    ("A100", "80GB", "PCIE"): DataSheet(312e12, 1935e9, _pcie(4)),
    ("A100", "80GB"): DataSheet(312e12, 2039e9, _nvlink(600e9)),  # SXM
    ("A100", "PCIE"): DataSheet(312e12, 1555e9, _pcie(4)),  # 40 GB
    ("A100",): DataSheet(312e12, 1555e9, _nvlink(600e9)),  # SXM, 40 GB
    ("A800",): DataSheet(312e12, 2039e9, _nvlink(400e9)),  # SXM, 80 GB: an A100 with slower links
    ("V100", "PCIE"): DataSheet(112e12, 900e9, _pcie(3)),
    ("V100",): DataSheet(125e12, 900e9, _nvlink(300e9)),  # SXM2
    ("L40S",): DataSheet(362e12, 864e9, _pcie(4)),
    ("L4",): DataSheet(121e12, 300e9, _pcie(4)),
    ("A40",): DataSheet(149.7e12, 696e9, _pcie(4)),
    ("A10",): DataSheet(125e12, 600e9, _pcie(4)),
    ("T4",): DataSheet(65e12, 300e9, _pcie(3)),
}


def data_sheet(name: str) -> DataSheet | None:
    """The data sheet of the GPU that has this name in torch; None for a GPU that is not listed."""
    found = set(re.split(r"[\s-]+", name.upper()))
    return next((sheet for words, sheet in DATA_SHEETS.items() if found.issuperset(words)), None)


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
CONTEXT = 900_000_000
"""The number of bytes that the CUDA context, kernels, and cuBLAS's workspaces take."""
NCCL = 600_000_000
"""The number of bytes that NCCL's channels take if there are several ranks."""
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


def reserved(world: int) -> int:
    """The number of bytes that the CUDA context and, with several ranks, NCCL's buffers take on a GPU. Tensors cannot
    use them. world: the number of ranks."""
    return CONTEXT + (NCCL if world > 1 else 0)
