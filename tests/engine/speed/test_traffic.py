"""What a step exchanges, counted by hand."""

from dataclasses import replace

from engine.memory.engine_plan import EnginePlan
from engine.memory.workload import Workload
from engine.speed.traffic import (
    ALL_GATHER,
    ALL_REDUCE,
    COPIES,
    EXPERIENCE,
    GATHERS,
    GENERATION,
    REDUCE_SCATTER,
    REDUCTIONS,
    Exchange,
    traffic_of_ppo,
    traffic_of_training,
)
from engine.zero.long_batch import Kept

# Two layers, gradients in ceil(1000 / 400) = 3 buckets.
PARTITIONED = EnginePlan(stage=3, numbers=1000, trains=1000, width=2, units=(600, 400), bucket=400)
WORKLOAD = Workload(prompt=8, response=16, generated=4, responses=8, micro_batch=2, mini_batches=2)
BUCKET = 2000 / 3


def test_without_copies_each_token_and_each_pass_gathers_the_weights():
    assert traffic_of_ppo({"actor": PARTITIONED}, WORKLOAD) == [
        Exchange(GENERATION, "actor", ALL_GATHER, 2 * 16, 1200),  # rounds of four rows, a token each
        Exchange(GENERATION, "actor", ALL_GATHER, 2 * 16, 800),
        Exchange(EXPERIENCE, "actor", ALL_GATHER, 4, 1200),
        Exchange(EXPERIENCE, "actor", ALL_GATHER, 4, 800),
        Exchange(REDUCTIONS, "actor", REDUCE_SCATTER, 2 * 2 * 3, BUCKET),  # updates, passes, buckets
        Exchange(GATHERS, "actor", ALL_GATHER, 2 * 2 * 2, 1200),  # updates, passes, forward and backward
        Exchange(GATHERS, "actor", ALL_GATHER, 2 * 2 * 2, 800),
    ]


def test_with_copies_weights_come_once_a_step_and_frozen_ones_once_for_all():
    trained = replace(PARTITIONED, generates=True, computes=True, kept=Kept(weights=True, gradients=True))
    frozen = replace(PARTITIONED, computes=True, trains=0)
    engines = {"actor": trained, "reference": frozen, "reward": replace(frozen, shared=True)}
    assert traffic_of_ppo(engines, WORKLOAD) == [
        Exchange(COPIES, "actor", ALL_GATHER, 1, 2000),
        Exchange(REDUCTIONS, "actor", REDUCE_SCATTER, 2 * 3, BUCKET),
        Exchange(GATHERS, "actor", ALL_GATHER, 2, 1200),
        Exchange(GATHERS, "actor", ALL_GATHER, 2, 800),
        Exchange(COPIES, "reward", ALL_GATHER, 1, 2000),
    ]


def test_weights_that_are_lent_are_not_gathered_for_training():
    (only,) = traffic_of_training(replace(PARTITIONED, lent=True, kept=Kept(gradients=True)), passes=4)
    assert only == Exchange(REDUCTIONS, "model", REDUCE_SCATTER, 3, BUCKET)
    assert only.total == 2000


def test_stages_0_to_2_sum_gradients_and_gather_new_weights():
    new_weights = Exchange(GATHERS, "model", ALL_GATHER, 1, 2000)
    assert traffic_of_training(replace(PARTITIONED, stage=0), passes=4) == [
        Exchange(REDUCTIONS, "model", ALL_REDUCE, 3, BUCKET)
    ]
    assert traffic_of_training(replace(PARTITIONED, stage=1), passes=4) == [
        Exchange(REDUCTIONS, "model", REDUCE_SCATTER, 3, BUCKET),
        new_weights,
    ]
    assert traffic_of_training(replace(PARTITIONED, stage=2), passes=4) == [
        Exchange(REDUCTIONS, "model", REDUCE_SCATTER, 12, BUCKET),
        new_weights,
    ]
