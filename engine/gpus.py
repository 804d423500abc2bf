"""Properties of GPUs: arithmetic speed, memory bandwidth and links (from data sheets), and what NCCL takes."""

import re
from dataclasses import dataclass


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


NCCL = 600_000_000
"""The number of bytes that NCCL's channels take of a GPU if there are several ranks."""
