"""Run by ranks: optimizer steps that are left out, and passes that are."""

from dataclasses import replace

import torch

from engine import distributed
from engine.algorithms import Dialect
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec
from tests.engine.zero.inspecting import masters, moments
from training.ppo_trainer import PPOTrainer
from training.reporting.metrics import Accumulator

LIMIT = 1.5
GUARDED = DIALECT.override(ratio_limit=LIMIT, warmup_steps=0)


def exploding(folder: str, stages: dict[str, tuple[int, str, str]]) -> dict[str, dict]:
    """By stage: weights before and after a step whose ratios explode on rank 0 alone, and after one that is sound."""
    found = {}
    for name, (stage, config, dtype) in stages.items():
        spec = engine_spec(folder, stage, config=config, dtype=dtype)
        trainer = build_trainer(spec, dialect=GUARDED)
        prompts = TinyPrompts(8).prompts(0)
        train, batches = trainer.train_actor_and_critic, []
        trainer.train_actor_and_critic = lambda batch, kl, metrics: batches.append(batch) or (0, 0)
        trainer.step(prompts)
        trainer.train_actor_and_critic, trainer.counters.steps_done, (batch,) = train, 0, batches
        # Ratios of e on rank 0 and 1 on rank 1: their mean is over the limit, rank 1's own is not.
        spoiled = replace(batch, logprobs=batch.logprobs - float(distributed.is_main()))
        found[name] = {
            "before": state(trainer),
            "left out": one(trainer, spoiled),
            "after": state(trainer),
            "sound": one(trainer, batch),
            "end": state(trainer),
        }
        found[name]["moments"] = moments(trainer.models.actor)
    return found


def one(trainer: PPOTrainer, batch) -> dict:
    """An optimizer step; its metrics."""
    metrics = Accumulator()
    trainer.learner.update(batch, torch.arange(len(batch)), metrics, actor=True, critic=True)
    return metrics.reduce()


def state(trainer: PPOTrainer) -> dict:
    """The weights of both models."""
    return {role: masters(model) for role, model in trainer.models.trained.items()}


def stopping(folder: str, dialect: Dialect, steps: int) -> list[dict]:
    """The metrics of some steps, and the optimizer steps that were counted."""
    trainer = build_trainer(engine_spec(folder, 0), dialect=dialect, total_steps=steps)
    return [
        report.metrics | {"optimizer steps": trainer.counters.optimizer_steps} for report in trainer.fit(TinyPrompts(8))
    ]
