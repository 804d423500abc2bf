"""What ranks exchange of one model in a step, by ZeRO's stage: the one count of calls and bytes there is."""

from dataclasses import dataclass

from engine.memory.memory_plan import EnginePlan
from engine.speed.decoding import Decoder, Ranks
from engine.speed.part import Part
from engine.zero.config import AHEAD, LIVE
from engine.zero.gathering import GATHER_BUCKET

REDUCED = 50_000_000
"""Gradients that are reduced at once (configs/ds/zero3.json)."""


def partitioned(decoder: Decoder, trains: bool = True) -> EnginePlan:
    """An engine at stage 3 of which all numbers train, or none, and nothing is kept."""
    numbers = decoder.parameters
    return EnginePlan(stage=3, numbers=numbers, trains=numbers if trains else 0, width=decoder.number, bucket=REDUCED)


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What these ranks exchange of a model. fetched: seconds until a rank's partition is on its GPU."""

    decoder: Decoder
    engine: EnginePlan
    ranks: Ranks
    fetched: float = 0.0

    def filling(self, numbers: int) -> Part:
        """A copy gets so many numbers: every rank gathers each of them."""
        calls = -(-numbers // GATHER_BUCKET)
        return self._gathered(numbers * self.engine.width, calls, fetched=self.fetched)

    def through_partitions(self, times: int, versions: int) -> Part:
        """Weights are gathered so many times, layer by layer, of which in as many `versions`.

        With hpZ, what has changed since is gathered over all ranks, and everything else within a group
        (`engine.zero.hpz`).
        """
        if self.engine.stage < 3 or not times:
            return Part()
        engine, calls, fetched = self.engine, fetches(self.decoder), times * self.fetched
        size = times * engine.numbers * engine.width
        if engine.hpz == 1:
            return self._gathered(size, times * calls, fetched=fetched)
        far = min(times, versions) if engine.trains else 0
        changed = far * engine.trains * engine.width
        unchanged = times - far if engine.trains == engine.numbers else times
        near = self._gathered(size - changed, unchanged * calls, engine.hpz, fetched)
        return self._gathered(changed, far * calls).then(near)

    def training(self, passes: int, updates: int, lent: bool = False, known: bool = False, alone: bool = True) -> Part:
        """The forward and backward passes of so many updates: weights are gathered in both, unless they stay.

        lent: whether a copy has the weights until the first update changes them. known: whether they have been gathered
        since they changed. alone: not in the engine of another role, whose passes reduce the gradients of both.
        """
        kept = self.engine.kept.weights
        again = 2 if self.decoder.parameters > LIVE else 1  # smaller models stay whole from forward to backward pass
        gathers = (updates - lent) * (1 if kept else again * passes)
        weights = self.through_partitions(gathers, updates - (lent or known))
        return weights.then(self.reducing(passes, updates)) if alone else weights

    def reducing(self, passes: int, updates: int) -> Part:
        """Stage 0 sums gradients up, 1 and 2 hand each rank its part of the sum, 2 in each pass, and gather new
        weights; 3 hands out sums in each pass, unless gradients are kept.

        Source: Rajbhandari et al. 2020, ZeRO, section 7; DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py.
        """
        engine, ranks = self.engine, self.ranks
        if not engine.trains:
            return Part()
        each_pass = engine.stage == 2 or (engine.stage == 3 and not engine.kept.gradients)
        times, calls = updates * (passes if each_pass else 1), -(-engine.trains // engine.bucket)
        size, reduce = engine.trains * engine.width, ranks.reduce_scatter if engine.stage else ranks.all_reduce
        latency = times * calls * reduce(0)
        summed = Part(0.0, latency, times * calls * reduce(size / calls) - latency, reduced=times * size)
        return summed.then(self._gathered(updates * size, updates)) if engine.stage in (1, 2) else summed

    def _gathered(self, size: float, calls: int, ranks: int | None = None, fetched: float = 0.0) -> Part:
        """So many bytes, gathered in so many calls of equal size by so many ranks, by default all; fetched: seconds in
        which parts come from host memory."""
        if not calls:
            return Part()
        latency = calls * self.ranks.all_gather(0, ranks)
        return Part(0.0, latency, calls * self.ranks.all_gather(size / calls, ranks) - latency + fetched, False, size)


def fetches(decoder: Decoder) -> int:
    """Collective calls by which ZeRO-3 gathers a model layer by layer: small layers come several at a time."""
    layer = (decoder.parameters - 2 * decoder.vocabulary * decoder.width) // decoder.layers
    return -(-decoder.parameters // max(AHEAD, layer))
