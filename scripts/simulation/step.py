"""How long a step of PPO takes: operations, bytes and collective calls of each part, divided by what GPUs attain.

    rates = assumed(data_sheet("NVIDIA A100-SXM4-80GB"))
    step = Step(decoders={"actor": shape}, rows=64, decoded=64, prompt=256, response=256, micro_batch=8)
    parts = step.parts(rates, Machines(rates.sheet, gpus=8, nodes=2, network=INFINIBAND_8X200G))
    seconds = sum(part.seconds for part in parts.values())

All engines are at ZeRO stage 3. Seconds are bounds from below: nothing is lost to Python, to tokenizing or to waiting
for the slowest rank, and no response ends early.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.memory.blueprint import Blueprint
from engine.memory.gpus import DataSheet, Link
from engine.rollout.cache import cache_bytes
from engine.zero.config import AHEAD, LIVE
from engine.zero.gathering import GATHER_BUCKET
from engine.zero.long_batch import NOTHING_KEPT, Kept

# NCCL's figures for rings with LL128, which it takes for the about 1 MB that a sum over ranks has while tokens are
# decoded: baseLat and hwLat in src/graph/tuning.cc of NVIDIA/nccl, 01afd20a77b5804e0ecf1042509dd9d20ebf9e93.
START = 10e-6
"""Seconds of a collective call, whatever its ranks and bytes."""
INFINIBAND_8X200G = Link(8 * 200e9 / 8, 4.0e-6)
"""Eight cards of 200 Gb/s a node, one for each GPU, as a DGX A100 has them."""
REDUCED = 50_000_000
"""Gradients that are reduced at once: reduce_bucket_size of configs/ds/zero3.json."""
ADAM = 28
"""Bytes that Adam reads and writes of a number: master and moments in float32 both ways, gradient and weight in 16
bits."""
GENERATE, EXPERIENCE, UPDATE, ELSE = 2, 8, 10, 5
"""Small collective calls of a rank in a step: agreements, counts, norms and metrics; UPDATE: of each optimizer step of
both models, ELSE: between phases."""
TRAINED = ("critic", "actor")

MATRIX = 0.45
"""Of the promised operations. Megatron-LM attains 0.44 to 0.52 of an A100's in training (Narayanan et al. 2021,
arXiv:2104.04473, table 1), with shapes larger than those of a rank here."""
MEMORY = 0.6
"""Of the promised memory bandwidth, while weights, keys and values are read for a token. Assumed."""
LINKS = 0.8
"""Of the promised bandwidth of links. nccl-tests' bus bandwidth on eight A100s is about 0.78 of NVLink's. Assumed."""
LAYER = 12 * 2.5e-6
"""Seconds of a decoder layer beside its arithmetic: 12 kernels, 2.5 us between one's end and the next one's work.
Assumed."""
PCIE, HOST = 20e9, 20e9
"""Bytes a second of a GPU's PCIe, and of a rank's share of its host's memory bandwidth. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a rank attains.

    sheet: operations of passes over many tokens, and bytes read while single tokens are decoded, a second. layer_start:
    seconds for each layer of a forward pass or of a token beside its arithmetic, of a backward pass twice. adam: bytes
    a second while the optimizer steps. host_link: bytes a second between a GPU and its host; host_adam: the same of a
    rank's optimizer in host memory. overlaps: whether ranks exchange weights and gradients while they compute.
    """

    sheet: DataSheet
    layer_start: float
    adam: float
    host_link: float = float("inf")
    host_adam: float = float("inf")
    overlaps: bool = True


def assumed(sheet: DataSheet) -> Rates:
    """What a GPU is taken to attain that nobody has measured: the same fractions for all of them."""
    attained = replace(
        sheet,
        flops=MATRIX * sheet.flops,
        bandwidth=MEMORY * sheet.bandwidth,
        link=Link(LINKS * sheet.link.bandwidth, sheet.link.latency),
    )
    adam = MEMORY * sheet.bandwidth
    return Rates(sheet=attained, layer_start=LAYER, adam=adam, host_link=PCIE, host_adam=HOST)


UNTIMED = DataSheet(flops=float("inf"), bandwidth=float("inf"), link=Link(float("inf"), 0.0))
NO_ARITHMETIC = Rates(sheet=UNTIMED, layer_start=0.0, adam=float("inf"), overlaps=False)
"""By which a step takes what ranks exchange, and nothing else."""


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
        (NVIDIA/nccl-tests, doc/PERFORMANCE.md, 03a204a1f38aaea17f1a777885bb2d9600ba7eff).
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


@dataclass(frozen=True, slots=True)
class MeasuredRanks:
    """Ranks whose collective calls have been timed. gathers, reductions: (bytes, seconds) of a call, by rising bytes:
    between measured sizes a straight line, and beyond the largest as the last piece goes on."""

    world: int
    gathers: Sequence[tuple[float, float]]
    reductions: Sequence[tuple[float, float]]
    sheet: DataSheet = UNTIMED

    def all_gather(self, size: float, ranks: int | None = None) -> float:
        """Seconds until all ranks have `size` bytes, of which each had an equal part; of one rank none."""
        return 0.0 if ranks == 1 else self._read(self.gathers, size)

    def all_reduce(self, size: float, ranks: int | None = None) -> float:
        """Seconds until each of the ranks has the sum of all tensors of `size` bytes; of one rank none."""
        return 0.0 if ranks == 1 else self._read(self.reductions, size)

    def reduce_scatter(self, size: float) -> float:
        """Seconds until each rank has its part of the sum of all tensors of `size` bytes."""
        return self._read(self.reductions, size)

    @staticmethod
    def _read(curve: Sequence[tuple[float, float]], size: float) -> float:
        place = min(max(1, bisect_right([at for at, _ in curve], size)), len(curve) - 1)
        (low, fast), (high, slow) = curve[place - 1], curve[place]
        return max(curve[0][1], fast + (slow - fast) * (size - low) / (high - low))


Ranks = Machines | MeasuredRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A language model's shape.

    parameters: how many. layers, width: decoder layers, and numbers of a hidden state. kept: numbers of a token's keys
    and values in one layer. vocabulary: logits of a token. number: bytes of a number, weights' and activations'.
    """

    parameters: int
    layers: int
    width: int
    kept: int
    vocabulary: int
    number: int = 2

    @classmethod
    def of(cls, model: Blueprint) -> "Decoder":
        """The shape of a model that the memory planner has built from its config.json."""
        config = model.module.model.config.get_text_config()
        layers = config.num_hidden_layers
        return cls(
            parameters=model.numbers,
            layers=layers,
            width=config.hidden_size,
            kept=cache_bytes(model.module.model, slots=1) // (layers * model.width),
            vocabulary=model.vocabulary,
            number=model.width,
        )

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return self.parameters * self.number

    def flops(self, length: float) -> float:
        """Floating-point operations of one token that attends to so many: two for each weight, and four for each number
        of a hidden state, each layer and each token attended to (Chowdhery et al. 2022, PaLM, appendix B)."""
        return 2 * self.parameters + 4 * self.layers * self.width * length

    def cached(self, length: float) -> float:
        """Bytes of keys and values of a row of so many tokens."""
        return self.layers * self.kept * self.number * length

    @property
    def fetches(self) -> int:
        """Collective calls by which ZeRO-3 gathers it layer by layer: small layers come several at a time."""
        layer = (self.parameters - 2 * self.vocabulary * self.width) // self.layers
        return -(-self.parameters // max(AHEAD, layer))


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of a part of a step. compute: arithmetic and reading. latency, transfer: of what ranks exchange, what it
    takes whatever its bytes, and what its bytes take. overlaps: whether both go on side by side. gathered, reduced:
    bytes that each rank has of all ranks in the end, and of which it has its part of the sum."""

    compute: float = 0.0
    latency: float = 0.0
    transfer: float = 0.0
    overlaps: bool = False
    gathered: float = 0.0
    reduced: float = 0.0

    @property
    def exchange(self) -> float:
        """Seconds in which ranks exchange."""
        return self.latency + self.transfer

    @property
    def seconds(self) -> float:
        """Altogether."""
        return max(self.compute, self.exchange) if self.overlaps else self.compute + self.exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What each rank does in a step.

    decoders: by role, of those that there are. rows: responses of a rank; decoded: of these side by side. prompt,
    response: tokens. micro_batch: rows of a pass. updates: optimizer steps of each model, each on rows / mini_batches.
    kept: by role, what stays whole over the passes of an optimizer step. whole, divided: roles with a copy, alone or
    with `group` ranks; own: roles whose copy no other model takes turns in; stays: these do also while training.
    checkpointed: whether backward passes compute activations again. offloaded: roles whose weights and states are in
    host memory. scored: whether the actor's log-probs are those of a forward pass.
    """

    decoders: Mapping[str, Decoder]
    rows: int
    decoded: int
    prompt: int
    response: int
    micro_batch: int
    mini_batches: int = 1
    updates: int = 1
    kept: Mapping[str, Kept] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    group: int = 1
    own: frozenset[str] = frozenset()
    stays: bool = False
    checkpointed: bool = False
    offloaded: frozenset[str] = frozenset()
    scored: bool = True

    def parts(self, rates: Rates, ranks: Ranks) -> dict[str, Part]:
        """The parts of a step, in their order, by name."""
        found = {"gather actor": self._filled("actor", rates, ranks)}
        found |= {"prompts": self._prompts(rates, ranks), "tokens": self._tokens(rates, ranks)}
        found["agree on rollouts"] = _agreed(GENERATE, ranks)
        if self.scored:
            found["actor"] = self._scored("actor", rates, ranks)
        for role in ("reference", "critic", "reward"):
            if role in self.decoders:
                found[f"gather {role}"] = self._filled(role, rates, ranks)
                found[role] = self._scored(role, rates, ranks)
        found["agree on experience"] = _agreed(EXPERIENCE, ranks)
        for role in TRAINED:
            if role in self.decoders:
                found[f"train {role}"] = self._trained(role, rates, ranks)
                found[f"step {role}"] = self._stepped(role, rates, ranks.world)
        return found | {"agree on updates": _agreed(self.updates * UPDATE, ranks), "metrics": _agreed(ELSE, ranks)}

    def _copied(self, role: str) -> bool:
        return role in self.whole or role in self.divided

    def _filled(self, role: str, rates: Rates, ranks: Ranks) -> Part:
        """The role's copy gets its weights: every rank gathers each of them, unless the copy still holds them."""
        holds = role in self.own and self.stays and role not in TRAINED
        if not self._copied(role) or holds or ranks.world == 1:
            return Part()
        calls = -(-self.decoders[role].parameters // GATHER_BUCKET)
        return self._gathered(role, 1, calls, rates, ranks)

    def _layers_gathered(self, role: str, times: int, rates: Rates, ranks: Ranks) -> Part:
        """Weights are gathered so many times, layer by layer."""
        return self._gathered(role, times, times * self.decoders[role].fetches, rates, ranks)

    def _gathered(self, role: str, times: int, calls: int, rates: Rates, ranks: Ranks) -> Part:
        """All weights so many times in so many calls of equal size, and from host memory if they are there."""
        if not calls:
            return Part()
        size, latency = times * self.decoders[role].size, calls * ranks.all_gather(0)
        fetched = self.decoders[role].size / ranks.world / rates.host_link if role in self.offloaded else 0.0
        transfer = calls * ranks.all_gather(size / calls) - latency + times * fetched
        return Part(0.0, latency, transfer, False, size)

    def _prompts(self, rates: Rates, ranks: Ranks) -> Part:
        decoder, turns = self.decoders["actor"], -(-self.rows // self.decoded)
        flops = self.rows * self.prompt * decoder.flops(self.prompt / 2)
        compute = flops / rates.sheet.flops + turns * decoder.layers * rates.layer_start
        if self._copied("actor") or ranks.world == 1:
            return Part(compute)
        return replace(self._layers_gathered("actor", turns, rates, ranks), compute=compute, overlaps=rates.overlaps)

    def _tokens(self, rates: Rates, ranks: Ranks) -> Part:
        """All but the first token of each response: rows take turns where not all are decoded side by side.

        With a copy that a group of ranks holds together, each reads and multiplies its part of the weights for the rows
        of all of them; hidden states are summed after the embedding and twice in each layer, and logits are gathered,
        and the next matrix waits for that (Shoeybi et al. 2019, Megatron-LM). Without a copy every rank gathers all
        weights for each token, a call for each layer, the embedding and the output layer, while it computes with what
        has come before.
        """
        decoder, turns = self.decoders["actor"], -(-self.rows // self.decoded)
        times, length, rows = turns * (self.response - 1), self.prompt + self.response / 2, self.rows / turns
        if self._copied("actor") or ranks.world == 1:
            group = self.group if "actor" in self.divided else 1
            sums, states = 2 * decoder.layers + 1, rows * group * decoder.number
            latency = sums * ranks.all_reduce(0, group) + ranks.all_gather(0, group)
            exchange = sums * ranks.all_reduce(states * decoder.width, group)
            exchange += ranks.all_gather(states * decoder.vocabulary, group)
            hidden, gathered, read = False, 0.0, decoder.size / group
        else:
            calls = decoder.layers + 2
            latency, exchange = calls * ranks.all_gather(0), calls * ranks.all_gather(decoder.size / calls)
            hidden, gathered, read = True, times * decoder.size, decoder.size
        memory = (read + rows * decoder.cached(length)) / ranks.sheet.bandwidth
        compute = max(memory, rows * decoder.flops(length) / ranks.sheet.flops) + decoder.layers * rates.layer_start
        exposed = max(0.0, exchange - compute) if hidden else exchange
        share = latency / exchange if exchange else 0.0
        return Part(times * compute, times * exposed * share, times * exposed * (1 - share), False, gathered)

    def _passes(self, rows: float) -> int:
        return -(-int(rows) // self.micro_batch)

    def _forward(self, role: str, rows: float, rates: Rates) -> float:
        decoder, length = self.decoders[role], self.prompt + self.response
        start = self._passes(rows) * decoder.layers * rates.layer_start
        return rows * length * decoder.flops(length / 2) / rates.sheet.flops + start

    def _scored(self, role: str, rates: Rates, ranks: Ranks) -> Part:
        compute = self._forward(role, self.rows, rates)
        if self._copied(role) or ranks.world == 1:
            return Part(compute)
        gathered = self._layers_gathered(role, self._passes(self.rows), rates, ranks)
        return replace(gathered, compute=compute, overlaps=rates.overlaps)

    def _trained(self, role: str, rates: Rates, ranks: Ranks) -> Part:
        """Forward and backward passes of all updates: weights are gathered for both, unless they stay whole or the copy
        lends them until the first update changes them; gradients are reduced in each pass, unless they are kept.

        Source: Rajbhandari et al. 2020, ZeRO, section 7; DeepSpeed 0.19.8, runtime/zero/stage3.py.
        """
        decoder, rows = self.decoders[role], self.rows / self.mini_batches
        compute = self.updates * self._forward(role, rows, rates) * (4 if self.checkpointed else 3)
        if ranks.world == 1:
            return Part(compute)
        passes, kept = self._passes(rows), self.kept.get(role, NOTHING_KEPT)
        lent = role in self.whole and role in self.own and self.stays
        again = 2 if decoder.parameters > LIVE else 1  # smaller models stay whole from forward to backward pass
        times = (self.updates - lent) * (1 if kept.weights else again * passes)
        weights = self._layers_gathered(role, times, rates, ranks)
        reduced = self.updates * (1 if kept.gradients else passes)
        calls = reduced * -(-decoder.parameters // REDUCED)
        latency = calls * ranks.reduce_scatter(0)
        transfer = calls * ranks.reduce_scatter(reduced * decoder.size / calls) - latency
        return replace(
            weights,
            compute=compute,
            latency=weights.latency + latency,
            transfer=weights.transfer + transfer,
            overlaps=rates.overlaps,
            reduced=reduced * decoder.size,
        )

    def _stepped(self, role: str, rates: Rates, world: int) -> Part:
        decoder, share = self.decoders[role], self.updates * self.decoders[role].parameters / world
        if role in self.offloaded:  # gradients go to the host, and weights come back
            return Part(share * (ADAM / rates.host_adam + 2 * decoder.number / rates.host_link))
        return Part(share * ADAM / rates.adam)


def _agreed(calls: int, ranks: Ranks) -> Part:
    return Part(latency=calls * ranks.all_reduce(8) if ranks.world > 1 else 0.0)
