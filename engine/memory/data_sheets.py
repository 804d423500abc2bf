"""What the data sheets of GPUs promise: arithmetic and memory bandwidth, by the names that torch has for them."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataSheet:
    """flops: a second, of dense matrices in 16 bits. bandwidth: bytes of memory a second."""

    flops: float
    bandwidth: float


# By words of what torch.cuda.get_device_name says; the first whose words are all in it counts. NVIDIA's data sheets,
# "NVIDIA H200 Tensor Core GPU" and alike, which state twice the dense rate ("with sparsity") from Ampere on.
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
    ("V100", "PCIE"): DataSheet(112e12, 900e9),
    ("V100",): DataSheet(125e12, 900e9),  # SXM2
    ("L40S",): DataSheet(362e12, 864e9),
    ("L4",): DataSheet(121e12, 300e9),
    ("A40",): DataSheet(149.7e12, 696e9),
    ("A10",): DataSheet(125e12, 600e9),
    ("T4",): DataSheet(65e12, 300e9),
}


def data_sheet(name: str) -> DataSheet | None:
    """What the GPU promises that torch calls so; None for one that is not listed."""
    found = set(re.split(r"[\s-]+", name.upper()))
    return next((sheet for words, sheet in DATA_SHEETS.items() if found.issuperset(words)), None)
