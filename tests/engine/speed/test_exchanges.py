"""What is exchanged of one model, counted by hand."""

from dataclasses import dataclass, replace

import pytest

from engine.memory.data_sheets import DataSheet
from engine.memory.memory_plan import EnginePlan
from engine.speed.decoding import Decoder
from engine.speed.exchanges import Exchanges, fetches
from engine.speed.measured import UNTIMED
from engine.speed.part import Part
from engine.zero.long_batch import Kept

# Ten layers of 100M numbers; embedding and output layer make it twelve calls. Gradients are in three buckets.
DECODER = Decoder(parameters=1_200_000_000, layers=10, width=1000, kept=100, vocabulary=100_000)
WHOLE = EnginePlan(stage=3, numbers=1_200_000_000, trains=1_200_000_000, width=2, bucket=500_000_000)
BYTES = 2_400_000_000
FACTORS = replace(WHOLE, trains=30_000_000, unmerged=1_000_000_000)
KEPT = Kept(weights=True, gradients=True)


@dataclass(frozen=True)
class Ranks:
    """A call has its kind's seconds, and one more for each 10^9 bytes; so the kinds of all calls can be told apart."""

    sheet: DataSheet
    world: int = 16

    def all_gather(self, size: float, ranks: int | None = None) -> float:
        return (1.0 if ranks is None else 0.01) + size / 1e9

    def all_reduce(self, size: float, ranks: int | None = None) -> float:
        return 1000.0 + size / 1e9

    def reduce_scatter(self, size: float) -> float:
        return 100.0 + size / 1e9


def of(engine: EnginePlan, fetched: float = 0.0) -> Exchanges:
    return Exchanges(DECODER, engine, Ranks(UNTIMED), fetched)


def same(part: Part, latency: float, gathered: float = 0, reduced: float = 0, fetched: float = 0.0) -> None:
    assert part.compute == 0
    assert part.latency == pytest.approx(latency)
    assert (part.gathered, part.reduced) == (gathered, reduced)
    assert part.transfer == pytest.approx((gathered + reduced) / 1e9 + fetched)


def test_weights_come_layer_by_layer():
    assert fetches(DECODER) == 12
    same(of(WHOLE).through_partitions(4, versions=1), latency=48, gathered=4 * BYTES)
    same(of(WHOLE, fetched=0.5).through_partitions(4, versions=1), latency=48, gathered=4 * BYTES, fetched=2)
    assert of(replace(WHOLE, stage=2)).through_partitions(4, versions=1) == Part()
    assert of(WHOLE).through_partitions(0, versions=0) == Part()


def test_a_copy_is_filled_in_buckets():
    same(of(WHOLE).filling(1_200_000_000), latency=18, gathered=BYTES)  # of 2^26 numbers
    same(of(WHOLE).filling(30_000_000), latency=1, gathered=60_000_000)
    assert of(WHOLE).filling(0) == Part()


def test_with_hpz_weights_cross_once_after_they_have_changed():
    hpz = replace(WHOLE, hpz=8)
    same(of(hpz).through_partitions(4, versions=1), latency=12 + 3 * 12 * 0.01, gathered=4 * BYTES)
    same(of(hpz).through_partitions(4, versions=0), latency=4 * 12 * 0.01, gathered=4 * BYTES)
    frozen = of(replace(hpz, trains=0))
    same(frozen.through_partitions(4, versions=1), latency=4 * 12 * 0.01, gathered=4 * BYTES)
    # Of LoRA the factors cross, and in all four passes groups gather what stays.
    adapted = of(replace(hpz, trains=FACTORS.trains)).through_partitions(4, versions=1)
    same(adapted, latency=12 + 4 * 12 * 0.01, gathered=4 * BYTES)


def test_an_update_gathers_twice_a_pass_and_reduces_once():
    both = of(WHOLE).training(passes=4, updates=2)
    same(both, latency=2 * 4 * 2 * 12 + 2 * 4 * 3 * 100, gathered=16 * BYTES, reduced=8 * BYTES)
    kept = of(replace(WHOLE, kept=KEPT)).training(passes=4, updates=2)
    same(kept, latency=2 * 12 + 2 * 3 * 100, gathered=2 * BYTES, reduced=2 * BYTES)
    lent = of(replace(WHOLE, kept=KEPT)).training(passes=4, updates=2, lent=True)
    same(lent, latency=12 + 2 * 3 * 100, gathered=BYTES, reduced=2 * BYTES)
    hosted = of(WHOLE).training(passes=4, updates=2, alone=False)
    same(hosted, latency=2 * 4 * 2 * 12, gathered=16 * BYTES)
    factors = of(FACTORS).training(passes=1, updates=1)
    same(factors, latency=24 + 100, gathered=2 * BYTES, reduced=60_000_000)
    known = of(replace(WHOLE, hpz=8)).training(passes=1, updates=2, known=True)  # the second update's come from afar
    same(known, latency=12 + 3 * 12 * 0.01 + 600, gathered=4 * BYTES, reduced=2 * BYTES)


def test_stages_0_to_2_sum_gradients_and_gather_new_weights():
    same(of(replace(WHOLE, stage=0)).training(4, 2), latency=2 * 3 * 1000, reduced=2 * BYTES)
    same(of(replace(WHOLE, stage=1)).training(4, 2), latency=2 * 3 * 100 + 2, gathered=2 * BYTES, reduced=2 * BYTES)
    same(of(replace(WHOLE, stage=2)).training(4, 2), latency=8 * 3 * 100 + 2, gathered=2 * BYTES, reduced=8 * BYTES)
    assert of(replace(WHOLE, stage=0, trains=0)).training(4, 2) == Part()
