"""What the data sheets of GPUs promise: arithmetic, memory bandwidth, links; by the names that torch has for them."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """What connects GPUs. bandwidth: bytes a second in one direction. latency: seconds of one step from GPU to GPU."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class DataSheet:
    """flops: a second, of dense matrices in 16 bits. bandwidth: bytes of memory a second. link: to any other GPU of its
    node; of cards on PCIe that, since bridges join no more than two or four."""

    flops: float
    bandwidth: float
    link: Link


# Latencies are those by which NCCL chooses how to reduce: hwLat, of rings with LL128, in src/graph/tuning.cc of
# NVIDIA/nccl, 01afd20a77b5804e0ecf1042509dd9d20ebf9e93.
def _nvlink(both_ways: float) -> Link:
    """NVLink of so many bytes a second in both directions together, as data sheets state it."""
    return Link(both_ways / 2, 1.9e-6)


def _pcie(generation: int) -> Link:
    """Sixteen lanes of PCIe."""
    return Link({3: 16e9, 4: 32e9, 5: 64e9}[generation], 2.5e-6)


# By words of what torch.cuda.get_device_name says; the first whose words are all in it counts. NVIDIA's data sheets,
# "NVIDIA H200 Tensor Core GPU" and alike, which state twice the dense rate ("with sparsity") from Ampere on.
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
    """What the GPU promises that torch calls so; None for one that is not listed."""
    found = set(re.split(r"[\s-]+", name.upper()))
    return next((sheet for words, sheet in DATA_SHEETS.items() if found.issuperset(words)), None)
