"""What one GPU or core attains: measured, or assumed of what its data sheet promises."""

from dataclasses import dataclass, replace

from engine.memory.data_sheets import DataSheet, Link
from engine.speed.machines import Machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a rank attains.

    sheet: operations of passes over many tokens, and bytes read while single tokens are decoded, a second; its link: to
    the other ranks of the node. layer_start: seconds for each layer of a forward pass beside its arithmetic, of a
    backward pass twice; token_start: the same of a decoded token. adam: bytes a second while the optimizer steps.
    host_link: bytes a second between a GPU and its host; host_adam: the same of a rank's optimizer in host memory.
    overlaps: whether ranks exchange weights and gradients while they compute.
    """

    sheet: DataSheet
    layer_start: float
    token_start: float
    adam: float
    host_link: float = float("inf")
    host_adam: float = float("inf")
    overlaps: bool = True

    def machines(self, gpus: int, nodes: int, network: Link) -> Machines:
        """Nodes of such GPUs, with the network as it is attained."""
        return Machines(self.sheet, gpus=gpus, nodes=nodes, network=network if nodes > 1 else None)


MATRIX = 0.45
"""Of the promised operations. Megatron-LM attains 0.44 to 0.52 of an A100's in training (Narayanan et al. 2021,
arXiv:2104.04473, table 1), with shapes larger than those of a rank here."""
MEMORY = 0.6
"""Of the promised memory bandwidth, while weights, keys and values are read for a token. Assumed."""
LINKS = 0.8
"""Of the promised bandwidth of links. nccl-tests' bus bandwidth on eight A100s is about 0.78 of NVLink's. Assumed."""
KERNELS, START = 12, 2.5e-6
"""Kernels of a decoder layer, and seconds between one's end and the next one's work. Assumed."""
PCIE, HOST = 20e9, 20e9
"""Bytes a second of a GPU's PCIe, and of a rank's share of its host's memory bandwidth. Assumed."""


def assumed(sheet: DataSheet) -> Rates:
    """What a GPU is taken to attain that nobody has measured: the same fractions for all of them."""
    attained = replace(
        sheet,
        flops=MATRIX * sheet.flops,
        bandwidth=MEMORY * sheet.bandwidth,
        link=Link(LINKS * sheet.link.bandwidth, sheet.link.latency),
    )
    start = KERNELS * START
    return Rates(
        sheet=attained,
        layer_start=start,
        token_start=start,
        adam=MEMORY * sheet.bandwidth,
        host_link=PCIE,
        host_adam=HOST,
    )
