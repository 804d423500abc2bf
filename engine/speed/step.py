"""How long a step of PPO takes on ranks at ZeRO-3: each phase's arithmetic, and what ranks exchange in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.speed.decoding import Decoder, Ranks, divided_token, partitioned_token
from engine.speed.rates import Rates
from engine.zero.fitting import AHEAD, LIVE
from engine.zero.gathering import GATHER_BUCKET
from engine.zero.long_batch import NOTHING_KEPT, Kept

REDUCED = 50_000_000
"""Gradients that are reduced at once (configs/ds/zero3.json)."""
ADAM = 28
"""Bytes that Adam reads and writes of a number: master and moments in float32 both ways, gradient and weight in 16
bits."""
GENERATE, EXPERIENCE, UPDATE, ELSE = 2, 8, 10, 5
"""Small collective calls of a rank in a step: agreements, counts, norms and metrics; UPDATE: of each optimizer step of
both models, ELSE: between phases."""


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
    """What each rank does in a step, all models at stage 3.

    decoders: by role, of those that there are; actor and reference, critic and reward model are of one shape each.
    rows: responses of a rank; decoded: of these side by side. prompt, response: tokens. micro_batch: rows of a pass.
    updates: optimizer steps, each on rows / mini_batches. whole, divided: roles with a copy, alone or with `group`
    ranks; shared: models of one shape take turns in one; stays: also while training. kept: over the passes of an
    optimizer step. checkpointed: whether backward passes compute activations again. offloaded: roles whose weights and
    states are in host memory. scored: whether the actor's log-probs are those of a forward pass.
    """

    decoders: Mapping[str, Decoder]
    rows: int
    decoded: int
    prompt: int
    response: int
    micro_batch: int
    mini_batches: int = 1
    updates: int = 1
    whole: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    group: int = 1
    shared: bool = True
    stays: bool = False
    kept: Mapping[str, Kept] = field(default_factory=dict)
    checkpointed: bool = False
    offloaded: frozenset[str] = frozenset()
    scored: bool = True

    def parts(self, rates: Rates, ranks: Ranks) -> dict[str, Part]:
        """The parts of a step, in their order, by name."""
        found = {"gather actor": self._filled("actor", rates, ranks)}
        found |= {"prompts": self._prompts(rates), "tokens": self._tokens(rates, ranks)}
        found["agree on rollouts"] = _agreed(GENERATE, ranks)
        if self.scored:
            found["actor"] = self._scored("actor", rates, ranks)
        for role in ("reference", "critic", "reward"):
            if role in self.decoders:
                found[f"gather {role}"] = self._filled(role, rates, ranks)
                found[role] = self._scored(role, rates, ranks)
        found["agree on experience"] = _agreed(EXPERIENCE, ranks)
        for role in ("critic", "actor"):
            if role in self.decoders:
                found[f"train {role}"] = self._trained(role, rates, ranks)
                found[f"step {role}"] = self._stepped(role, rates, ranks.world)
        return found | {"agree on updates": _agreed(self.updates * UPDATE, ranks), "metrics": _agreed(ELSE, ranks)}

    def _copied(self, role: str) -> bool:
        return role in self.whole or role in self.divided

    def _filled(self, role: str, rates: Rates, ranks: Ranks) -> Part:
        """The role's copy gets its weights, where it does not hold them yet: every rank gathers each of them."""
        fresh = self.stays and not self.shared and role in ("reference", "reward")
        if not self._copied(role) or fresh or ranks.world == 1:
            return Part()
        decoder = self.decoders[role]
        return _gathered(
            decoder.size, -(-decoder.parameters // GATHER_BUCKET), ranks, self._fetched(role, rates, ranks)
        )

    def _fetched(self, role: str, rates: Rates, ranks: Ranks) -> float:
        """Seconds until the role's partition is on its GPU."""
        return self.decoders[role].size / ranks.world / rates.host_link if role in self.offloaded else 0.0

    def _prompts(self, rates: Rates) -> Part:
        decoder, turns = self.decoders["actor"], -(-self.rows // self.decoded)
        flops = self.rows * self.prompt * decoder.flops(self.prompt / 2)
        return Part(compute=flops / rates.sheet.flops + turns * decoder.layers * rates.layer_start)

    def _tokens(self, rates: Rates, ranks: Ranks) -> Part:
        """All but the first token of each response: rows take turns where not all are decoded side by side."""
        decoder, turns = self.decoders["actor"], -(-self.rows // self.decoded)
        times, length = turns * (self.response - 1), self.prompt + self.response / 2
        rows = self.rows / turns
        if not self._copied("actor") and ranks.world > 1:
            token = partitioned_token(decoder, ranks, rows, length)
            latency = (decoder.layers + 2) * ranks.all_gather(0)
        else:
            group = self.group if "actor" in self.divided else 1
            token = divided_token(decoder, ranks, rows, length, group)
            latency = (2 * decoder.layers + 1) * ranks.all_reduce(0, group) + ranks.all_gather(0, group)
        compute = max(token.memory, token.arithmetic) + decoder.layers * rates.token_start
        exposed = token.exchange if not token.overlaps else max(0.0, token.exchange - compute)
        share = latency / token.exchange if token.exchange else 0.0
        return Part(times * compute, times * exposed * share, times * exposed * (1 - share))

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
        passes, decoder = self._passes(self.rows), self.decoders[role]
        fetched = passes * self._fetched(role, rates, ranks)
        part = _gathered(passes * decoder.size, passes * fetches(decoder), ranks, fetched)
        return Part(compute, part.latency, part.transfer, rates.overlaps, part.gathered)

    def _trained(self, role: str, rates: Rates, ranks: Ranks) -> Part:
        """The forward and backward passes of all updates: weights are gathered in both, unless they stay."""
        decoder, rows = self.decoders[role], self.rows / self.mini_batches
        compute = self.updates * self._forward(role, rows, rates) * (4 if self.checkpointed else 3)
        if ranks.world == 1:
            return Part(compute)
        passes, kept = self._passes(rows), self.kept.get(role, NOTHING_KEPT)
        lent = role in self.whole and self.stays and not self.shared  # until the first update has changed them
        again = 2 if decoder.parameters > LIVE else 1  # smaller models stay whole from forward to backward pass
        gathers = (self.updates - lent) * (1 if kept.weights else again * passes)
        fetched = gathers * self._fetched(role, rates, ranks)
        gathered = _gathered(gathers * decoder.size, gathers * fetches(decoder), ranks, fetched)
        reductions = self.updates * (1 if kept.gradients else passes)
        calls = -(-decoder.parameters // REDUCED)
        reduced = reductions * calls * ranks.reduce_scatter(decoder.size / calls)
        latency = reductions * calls * ranks.reduce_scatter(0)
        return Part(
            compute,
            gathered.latency + latency,
            gathered.transfer + reduced - latency,
            rates.overlaps,
            gathered.gathered,
            reductions * decoder.size,
        )

    def _stepped(self, role: str, rates: Rates, world: int) -> Part:
        share = self.updates * self.decoders[role].parameters / world
        if role in self.offloaded:  # gradients go to the host, and weights come back
            return Part(share * (ADAM / rates.host_adam + 2 * self.decoders[role].number / rates.host_link))
        return Part(share * ADAM / rates.adam)


def fetches(decoder: Decoder) -> int:
    """Collective calls by which ZeRO-3 gathers a model layer by layer: small layers come several at a time."""
    layer = (decoder.parameters - 2 * decoder.vocabulary * decoder.width) // decoder.layers
    return -(-decoder.parameters // max(AHEAD, layer))


def _gathered(size: float, calls: int, ranks: Ranks, fetched: float = 0.0) -> Part:
    """So many bytes, gathered in so many calls of equal size; fetched: seconds in which parts come from host memory."""
    if not calls:
        return Part()
    latency = calls * ranks.all_gather(0)
    return Part(0.0, latency, calls * ranks.all_gather(size / calls) - latency + fetched, False, size)


def _agreed(calls: int, ranks: Ranks) -> Part:
    return Part(latency=calls * ranks.all_reduce(8) if ranks.world > 1 else 0.0)
