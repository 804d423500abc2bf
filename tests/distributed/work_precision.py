"""Run by ranks: training in half precision, and what an overflow in one of the two trained models does to both."""

import contextlib

from engine import distributed
from engine.engine_spec import OptimizerSpec
from engine.zero.engines import TrainedModel
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec, timeless
from tests.engine.zero.inspecting import masters, moments, pretend_cpus_have_fp16, weights
from training.ppo_trainer import PPOTrainer
from training.reporting.metrics import Accumulator

STEADY = DIALECT.override(lr_schedule="constant", warmup_steps=0)
STILL = STEADY.override(actor_lr=0.0, critic_lr=0.0)
ROUNDS = 6


def all_stages(folder: str, dtype: str, stages: tuple[int, ...]) -> dict[int, dict]:
    """What the functions below return, by stage."""
    pretend_cpus_have_fp16()
    return {
        stage: training(folder, dtype, stage)
        | repeated_gradient(folder, dtype, stage)
        | (joint_skips(folder, dtype, stage) if dtype == "fp16" else {})
        for stage in stages
    }


def training(folder: str, dtype: str, stage: int) -> dict:
    """One step, then ROUNDS - 1 more optimizer steps on the same experience."""
    trainer = build_trainer(engine_spec(folder, stage, dtype=dtype, config=f"stage{stage}.json"), dialect=STEADY)
    before = everything(trainer)
    report = trainer.step(TinyPrompts(8).prompts(0))
    rounds = [timeless(report.metrics)]
    for _ in range(ROUNDS - 1):
        metrics = Accumulator()
        trainer.train_actor_and_critic(report.batch, 0.0, metrics)
        rounds.append(metrics.reduce())
    return {"experience": report.batch, "rounds": rounds, "untrained": before, "trained": everything(trainer)}


def repeated_gradient(folder: str, dtype: str, stage: int) -> dict:
    """Adam's first moments after ROUNDS unclipped steps at learning rate 0, in which the fp16 loss scale has grown."""
    still = OptimizerSpec(lr=0.0, betas=STILL.betas, max_grad_norm=0.0)
    spec = engine_spec(
        folder, stage, dtype=dtype, config=f"stage{stage}_growing.json", actor_optimizer=still, critic_optimizer=still
    )
    trainer = build_trainer(spec, dialect=STILL)
    report = trainer.step(TinyPrompts(8).prompts(0))
    for _ in range(ROUNDS - 1):
        trainer.train_actor_and_critic(report.batch, 0.0, Accumulator())
    found = {
        name: {"moments": moments(model), "weights": weights(model), "loss_scale": model.loss_scale}
        for name, model in (("actor", trainer.models.actor), ("critic", trainer.models.critic))
    }
    return {"repeated": found | {"experience": report.batch}}


def joint_skips(folder: str, dtype: str, stage: int) -> dict:
    """What everything is after a step, one in which the critic overflows, one in which the actor does, and a step."""
    spec = engine_spec(folder, stage, dtype=dtype, config=f"stage{stage}.json", ema_decay=0.5)
    trainer = build_trainer(spec, dialect=STEADY)
    feed, states = TinyPrompts(8), {}
    events = {
        "first step": None,
        "critic overflows": trainer.models.critic,
        "actor overflows": trainer.models.actor,
        "last step": None,
    }
    for event, overflowing in events.items():
        with overflow_on_last_rank(overflowing):
            report = trainer.step(feed.prompts(len(states)))
        states[event] = everything(trainer) | {"metrics": timeless(report.metrics)}
    return {"events": states}


@contextlib.contextmanager
def overflow_on_last_rank(model: TrainedModel | None):
    """Within this context the model's gradients are infinite on the last rank; the others' are as they should be."""
    if model is None:
        yield
        return
    factor = 1e12 if distributed.rank() == distributed.world_size() - 1 else 1.0
    model.backward = lambda loss, last: TrainedModel.backward(model, loss * factor, last)
    yield
    del model.backward


def everything(trainer: PPOTrainer) -> dict:
    """All that a step may change in the engines (all ranks call this)."""
    engine = trainer.models
    found = {"ema": [shard.clone() for shard in engine.ema.means] if engine.ema else []}
    for name, model in (("actor", engine.actor), ("critic", engine.critic)):
        found[name] = {
            "weights": weights(model),
            "masters": masters(model),
            "loss_scale": model.loss_scale,
            "version": model.version,
        }
    return found
