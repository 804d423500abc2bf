"""GPUs in nodes, and how long they take to exchange numbers."""

import math
from dataclasses import dataclass

from engine.memory.data_sheets import DataSheet, Link

# NCCL's figures for rings with LL128, which it takes for the about 1 MB that a sum over ranks has while tokens are
# decoded: baseLat and hwLat in src/graph/tuning.cc of NVIDIA/nccl, 01afd20a77b5804e0ecf1042509dd9d20ebf9e93.
START = 10e-6
"""Seconds of a collective call, whatever its ranks and bytes."""
ETHERNET_100G = Link(100e9 / 8, 4.0e-6)
"""One card of 100 Gb/s a node, Ethernet or InfiniBand."""
INFINIBAND_8X200G = Link(8 * 200e9 / 8, 4.0e-6)
"""Eight cards of 200 Gb/s a node, one for each GPU, as a DGX A100 has them."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes of one kind.

    sheet: of each GPU. gpus: of each node. network: of a node to the others, all its cards together; None for one node.
    """

    sheet: DataSheet
    gpus: int = 8
    nodes: int = 1
    network: Link | None = None

    @property
    def world(self) -> int:
        """Ranks."""
        return self.gpus * self.nodes

    def all_gather(self, size: float, ranks: int | None = None) -> float:
        """Seconds until each of so many neighbouring ranks, by default all, has `size` bytes, of which each had an
        equal part.

        A ring: (n - 1) / n of the bytes go through each link, the slowest of which counts, in n - 1 steps
        (NVIDIA/nccl-tests, doc/PERFORMANCE.md, 03a204a1f38aaea17f1a777885bb2d9600ba7eff). `reduce_scatter` of as many
        bytes takes as long.
        """
        return self._ring(size, ranks or self.world, rounds=1)

    def all_reduce(self, size: float, ranks: int | None = None) -> float:
        """Seconds until each of the ranks has the sum of all tensors of `size` bytes: twice around the ring, to add up
        and to pass on; or over several nodes up and down a tree of them, which sends as much in fewer steps (Jeaugey
        2019, "Massively Scale Your Deep Learning Training with NCCL 2.4"; latency as in tuning.cc, above)."""
        count = ranks or self.world
        ring, nodes = self._ring(size, count, rounds=2), -(-count // self.gpus)
        if nodes == 1:
            return ring
        assert self.network is not None
        steps = (self.gpus - 1) * self.sheet.link.latency + math.log2(nodes) * self.network.latency
        bandwidth = min(self.sheet.link.bandwidth, self.network.bandwidth)
        return min(ring, START + 2 * (steps + (count - 1) / count * size / bandwidth))

    def reduce_scatter(self, size: float) -> float:
        """Seconds until each rank has its part of the sum of all tensors of `size` bytes: once around the ring."""
        return self._ring(size, self.world, rounds=1)

    def _ring(self, size: float, ranks: int, rounds: int) -> float:
        if ranks == 1:
            return 0.0
        between = -(-ranks // self.gpus) - 1  # steps that go over the network
        bandwidth, far = self.sheet.link.bandwidth, 0.0
        if between:
            assert self.network is not None, f"{ranks} ranks on nodes of {self.gpus} GPUs need a network"
            bandwidth, far = min(bandwidth, self.network.bandwidth), between * self.network.latency
        latency = (ranks - 1 - between) * self.sheet.link.latency + far
        return START + rounds * (latency + (ranks - 1) / ranks * size / bandwidth)
