"""Run by ranks: actors of which only the last layers train, with frozen copies of these for a reference."""

from pathlib import Path
from types import SimpleNamespace

import torch

from engine.experience import Rollout
from engine.models.loading import load_policy
from engine.reference import Reference
from engine.rlhf_engine import EngineSpec, RLHFEngine, frozen_model
from engine.zero.config import EngineConfig
from engine.zero.engines import TrainedModel
from tests.distributed.tiny_run import (
    TinyPrompts,
    build_trainer,
    engine_spec,
    read_checkpoint,
    timeless,
    write_checkpoint,
)
from tests.engine.zero.inspecting import parameter_bytes, weights
from training.ppo_trainer import PPOTrainer
from training.runtime import model_folders

EMA_DECAY = 0.5
STEPS, SAVED_AFTER = 3, 2
TEMPERATURE = 0.8


def one_run(
    folder: str,
    output: str,
    stage: int,
    config: str,
    dtype: str = "fp32",
    actor: str = "actor",
    layers: int = 1,
    backend: str = "replica",
    checkpointing: bool = False,
) -> dict:
    """Three steps with an EMA and a checkpoint after the second; the last once more, in new engines, from there."""

    def new_trainer() -> PPOTrainer:
        spec = engine_spec(
            folder,
            stage,
            config=config,
            dtype=dtype,
            actor=actor,
            reference=None,
            hydra_layers=layers,
            ema_decay=EMA_DECAY,
            actor_gradient_checkpointing=checkpointing,
        )
        return build_trainer(spec, backend=backend, total_steps=STEPS)

    trainer = new_trainer()
    engine = trainer.models
    own = Reference(
        frozen_model(
            load_policy,
            f"{folder}/{actor}",
            EngineConfig("reference", 3, path=f"{folder}/{config}") if stage == 3 else EngineConfig("reference", 0),
            EngineSpec(actor_path="", critic_path="", dtype=dtype),
        )
    )
    result = {
        "before": weights(engine.actor),
        "branch_before": branch(engine.actor),
        "models": len(engine.engines),
        "bytes": local_bytes(engine),
        "own_bytes": sum(map(parameter_bytes, own.models)),
        "metrics": [],
    }
    for report in trainer.fit(TinyPrompts(8)):
        result["metrics"].append(timeless(report.metrics))
        if report.step == 1:
            result["first"] = report.batch
        if report.step == SAVED_AFTER:
            write_checkpoint(output, engine, trainer.state_dict())
    rollout = report.batch.rollout
    result["logprobs"] = judged(engine, own, rollout)
    with engine.ema.swapped():
        result["averaged"] = {"logprobs": judged(engine, own, rollout), "weights": weights(engine.actor)}
        model_folders.save(engine.actor, engine.tokenizer, Path(output), "ema")
    model_folders.save(engine.actor, engine.tokenizer, Path(output), "actor")
    result |= {
        "after": weights(engine.actor),
        "branch_after": branch(engine.actor),
        "ema": [shard.clone() for shard in engine.ema.means],
    }
    resumed = new_trainer()
    resumed.load_state_dict(read_checkpoint(output, resumed.models))
    result["resumed_metrics"] = [timeless(report.metrics) for report in resumed.fit(TinyPrompts(8))]
    result["resumed"] = {
        "after": weights(resumed.models.actor),
        "branch": branch(resumed.models.actor),
        "logprobs": judged(resumed.models, own, rollout),
        "ema": [shard.clone() for shard in resumed.models.ema.means],
    }
    return result


@torch.no_grad()
def judged(engine: RLHFEngine, own: Reference, rollout: Rollout) -> dict:
    """Log-probs of a rollout by the actor, by the hydra's reference, and by the untouched model in its own engine."""
    inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
    actor, _ = engine.actor(*inputs, response_length=rollout.response_length, temperature=TEMPERATURE)
    with engine.reference.on_device():
        return {
            "actor": actor,
            "reference": engine.reference.ref_logprobs(rollout, TEMPERATURE),
            "untouched": own.ref_logprobs(rollout, TEMPERATURE),
        }


def branch(actor: TrainedModel) -> dict:
    """Copies of the full weights of the frozen copies, by number of the copy and name within it."""
    return weights(SimpleNamespace(module=SimpleNamespace(model=actor.module.branch)))


def local_bytes(engine: RLHFEngine) -> dict[str, int]:
    """`parameter_bytes` of each engine that there is."""
    found = {role: parameter_bytes(model) for role, model in engine.trained.items()}
    found |= {f"reference {index}": parameter_bytes(model) for index, model in enumerate(engine.reference.models)}
    return found | {reward.model.role: parameter_bytes(reward.model) for reward in engine.rewards}
