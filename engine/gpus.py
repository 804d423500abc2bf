"""Properties of GPUs: arithmetic speed and memory bandwidth (from data sheets), and what NCCL takes."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataSheet:
    """Numbers from a GPU's data sheet.

    flops: floating-point operations per second on dense 16-bit matrices.
    bandwidth: bytes per second to and from the GPU's memory.
    """

    flops: float
    bandwidth: float


# Keys are words of torch.cuda.get_device_name. A GPU has the first entry whose words all occur in its name. Source:
# NVIDIA's data sheets ("NVIDIA H200 Tensor Core GPU" and similar ones). From Ampere on, data sheets state twice the
# dense rate ("with sparsity").
DATA_SHEETS = {
    ("B200",): DataSheet(2250e12, 8000e9),
    ("H200", "NVL"): DataSheet(835e12, 4800e9),
    ("H200",): DataSheet(989e12, 4800e9),
    ("H100", "NVL"): DataSheet(835e12, 3900e9),
    ("H100", "PCIE"): DataSheet(756e12, 2000e9),
    ("H100",): DataSheet(989e12, 3350e9),  # SXM
    ("A100", "80GB", "PCIE"): DataSheet(312e12, 1935e9),
    ("A100", "80GB"): DataSheet(312e12, 2039e9),  # SXM
    ("A100",): DataSheet(312e12, 1555e9),  # 40 GB
    ("A800",): DataSheet(312e12, 2039e9),  # SXM, 80 GB
    ("V100", "PCIE"): DataSheet(112e12, 900e9),
    ("V100",): DataSheet(125e12, 900e9),  # SXM2
    ("L40S",): DataSheet(362e12, 864e9),
    ("L4",): DataSheet(121e12, 300e9),
    ("A40",): DataSheet(149.7e12, 696e9),
    ("A10",): DataSheet(125e12, 600e9),
    ("T4",): DataSheet(65e12, 300e9),
}


def data_sheet(name: str) -> DataSheet | None:
    """The data sheet of the GPU that has this name in torch; None for a GPU that is not listed."""
    found = set(re.split(r"[\s-]+", name.upper()))
    return next((sheet for words, sheet in DATA_SHEETS.items() if found.issuperset(words)), None)


NCCL = 600_000_000
"""The number of bytes that NCCL's channels take of a GPU if there are several ranks."""
