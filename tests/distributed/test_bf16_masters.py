"""DeepSpeed's bf16_master_weights_and_grads and bf16_optimizer_states: what is in 16 bits then, and what is not."""

import pytest
import torch

from engine import distributed
from engine.zero.adam_state import MOMENTS, moment_of
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import TinyPrompts, build_trainer, engine_spec
from tests.distributed.work_precision import STEADY
from tests.engine.zero.inspecting import masters, weights
from tests.engine.zero.shard_memory import InMemory, whole
from training.reporting.metrics import Accumulator

ROUNDS = 6


def both(folder: str, stages: tuple[int, ...]) -> dict[int, dict]:
    """What `training` returns, by stage."""
    return {stage: training(folder, stage) for stage in stages}


def training(folder: str, stage: int) -> dict:
    """A step and ROUNDS - 1 more on its experience; then what everything is, while the averages are swapped in, after
    that, and in new engines that have been given the shards."""
    spec = engine_spec(folder, stage, dtype="bf16", config=f"stage{stage}_bf16.json", ema_decay=0.5)
    trainer = build_trainer(spec, dialect=STEADY)
    actor, ema, metrics = trainer.models.actor, trainer.models.ema, Accumulator()
    untrained = masters(actor)
    report = trainer.step(TinyPrompts(8).prompts(0))
    for _ in range(ROUNDS - 1):
        metrics = Accumulator()
        trainer.train_actor_and_critic(report.batch, 0.0, metrics)
    found = {"losses": (report.metrics["policy/loss"], metrics.reduce()["policy/loss"]), "untrained": untrained}
    found["trained"] = everything(trainer)
    means = [mean.clone() for mean in ema.means]
    with ema.swapped():
        swapped = [shard.clone() for shard in actor.master_shards()]
        found["swapped"] = all(shard.equal(mean.to(shard.dtype)) for shard, mean in zip(swapped, means, strict=True))
    found["after"] = everything(trainer)
    other = build_trainer(spec, dialect=STEADY)
    other.models.actor.load_shards(_source(actor.shards()), actor.scalars())
    other.models.ema.load_shards(_source(ema.shards()))
    found["restored"] = everything(other)
    return found


def everything(trainer) -> dict:
    """The actor's state (all ranks call this)."""
    actor = trainer.models.actor
    held = [(master.adam, master.tensor) for master in actor.state.stage.masters()]
    return {
        "weights": weights(actor),
        "masters": [shard.clone() for shard in actor.master_shards()],
        "moments": [moment_of(adam, tensor, moment).clone() for adam, tensor in held for moment in MOMENTS],
        "means": [mean.clone() for mean in trainer.models.ema.means],
    }


def _source(shards) -> InMemory:
    return InMemory(whole([shard for part in distributed.all_gather_objects(shards) for shard in part]))


STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_bf16_masters:both", folder=folder, stages=STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_masters_and_moments_are_in_16_bits_and_averages_in_32(ranks, stage):
    for rank in ranks:
        found = rank[stage]["trained"]
        assert {tensor.dtype for name in ("weights", "masters", "moments") for tensor in _all(found[name])} == {
            torch.bfloat16
        }
        assert {mean.dtype for mean in found["means"]} == {torch.float32}
        assert any((mean != mean.bfloat16()).any() for mean in found["means"])  # more than bfloat16 holds


@pytest.mark.parametrize("stage", STAGES)
def test_it_learns(ranks, stage):
    first, last = ranks[0][stage]["losses"]
    assert last < first - 0.02


@pytest.mark.parametrize("stage", STAGES)
def test_after_the_averages_were_swapped_in_all_is_as_before(ranks, stage):
    for rank in ranks:
        assert rank[stage]["swapped"] and _equal(rank[stage]["trained"], rank[stage]["after"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_restart_point_has_all_of_it(ranks, stage):
    for rank in ranks:
        assert _equal(rank[stage]["trained"], rank[stage]["restored"])


def _all(tensors) -> list[torch.Tensor]:
    return list(tensors.values()) if isinstance(tensors, dict) else tensors


def _equal(one: dict, other: dict) -> bool:
    return all(
        len(one[name]) == len(other[name])
        and all(torch.equal(a, b) for a, b in zip(_all(one[name]), _all(other[name])))
        for name in one
    )
