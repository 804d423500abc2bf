"""Run by ranks: training with master weights, gradients and moments in bfloat16."""

from engine import distributed
from engine.zero.shards import MOMENTS, moment_of
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
