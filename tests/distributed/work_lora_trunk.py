"""Run by ranks: one trunk in which actor and critic learn, against an engine for each."""

from pathlib import Path

import torch

from engine.engine_spec import EngineSpec, OptimizerSpec
from engine.experience import Rollout
from engine.models.lora import LoraSpec
from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from engine.zero.config import EngineConfig
from tests.distributed.tiny_points import load_point, save_point
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, timeless
from tests.engine.zero.inspecting import parameter_bytes, pretend_cpus_have_fp16, weights
from training.critic_pretraining import CriticPretraining
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.runtime import model_folders

STEPS, SAVED_AFTER = 3, 2


def all_runs(folder: str, output: str, runs: dict[str, dict]) -> dict[str, dict]:
    """`one_run` of each set of arguments, by the same names."""
    pretend_cpus_have_fp16()
    return {name: one_run(folder, f"{output}/{name}", **arguments) for name, arguments in runs.items()}


def new_trainer(
    folder: str, stage: int, share: bool, dtype: str = "fp32", checkpointing: bool = False, apart: bool = False
) -> PPOTrainer:
    """A trainer whose actor and critic go on with adapters of one base, in one engine or in two.

    The critic warms up for a step. apart: it is pretrained before, and has four epochs of its own.
    """
    config = str(Path(folder) / f"stage{stage}.json")
    spec = EngineSpec(
        actor_path=f"{folder}/start_adapter",
        critic_path=f"{folder}/judge_adapter",
        dtype=dtype,
        share_trunk=share,
        actor_lora=LoraSpec(dim=4, lr=2e-3, only=True),
        critic_lora=LoraSpec(dim=2, lr=1e-3, only=True),
        actor=EngineConfig("actor", stage, path=config),
        critic=EngineConfig("critic", stage, path=config),
        actor_optimizer=OptimizerSpec(lr=1e-3, weight_decay=0.1, max_grad_norm=0.3),
        critic_optimizer=OptimizerSpec(lr=2e-3, weight_decay=0.05, max_grad_norm=0.2),
        actor_gradient_checkpointing=checkpointing,
        ema_decay=0.5,
    )
    engine = RLHFEngine.from_pretrained(spec)
    return PPOTrainer(
        models=engine,
        rollouts=build_rollouts("replica", engine.actor, engine.tokenizer, others=engine.engines),
        dialect=DIALECT.override(ppo_epochs=2, critic_epochs=4 if apart else None),
        config=PPOConfig(
            total_steps=STEPS, micro_batch_size=4, critic_warmup_steps=1, critic_pretrain_steps=2 if apart else 0
        ),
        sampling=SAMPLING,
    )


def one_run(folder: str, output: str, resumed: bool = False, steps: int = STEPS, **arguments) -> dict:
    """So many steps of several optimizer steps, each of several micro-batches; what is saved, with the average too.

    resumed: also the last step once more, in new engines, from the checkpoint after the second.
    """
    trainer, feed = new_trainer(folder, **arguments), TinyPrompts(16)
    models, found = trainer.models, {"metrics": []}
    found["metrics"] += [report.metrics for report in CriticPretraining(trainer).fit(feed)]
    while trainer.steps_done < steps:
        report = trainer.step(feed.prompts(trainer.steps_done))
        found["metrics"].append(timeless(report.metrics))
        if report.step == SAVED_AFTER and resumed:
            save_point(output, models, trainer.state_dict())
    rollout = report.batch.rollout
    found |= {
        "weights": {role: weights(model) for role, model in models.trained.items()},
        "engines": [model.role for model in models.engines],
        "bytes": sum(parameter_bytes(model) for model in models.engines),
        "copies": [sum(p.numel() for p in copy.parameters()) for copy in trainer.rollouts.copies._modules.values()],
        "steps": {role: model.scalars()["adam_steps"] for role, model in models.trained.items()},
        "judged": judged(models, rollout),
    }
    with models.ema.swapped():
        found["averaged"] = judged(models, rollout)
    found["judged again"] = judged(models, rollout)
    if resumed:
        for role, model in models.trained.items():
            model_folders.save_forms(model, models.tokenizer, Path(output), role)
        again = new_trainer(folder, **arguments)
        again.load_state_dict(load_point(output, again.models))
        found["resumed_metrics"] = [timeless(report.metrics) for report in again.fit(feed)]
        found["resumed weights"] = {role: weights(model) for role, model in again.models.trained.items()}
        found["resumed average"] = [mean.clone() for mean in again.models.ema.means]
        found["average"] = [mean.clone() for mean in models.ema.means]
        found["inputs"] = (rollout.sequences, rollout.attention_mask, rollout.position_ids, rollout.response_length)
    return found


@torch.no_grad()
def judged(models: RLHFEngine, rollout: Rollout) -> dict:
    """What the four roles say of a rollout."""
    inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
    return {
        "actor": models.actor(*inputs, response_length=rollout.response_length)[0],
        "reference": models.reference.ref_logprobs(rollout, 1.0),
        "critic": models.critic(*inputs),
        "reward": models.reward.score(rollout),
    }
