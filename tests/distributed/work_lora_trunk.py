"""Run by ranks: one trunk in which actor and critic learn, against an engine for each."""

from pathlib import Path

from torch import Tensor

from engine.engine_spec import EngineSpec, OptimizerSpec
from engine.experience import Rollout
from engine.models.lora import LoraSpec
from engine.reward.base import RewardSource
from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from engine.zero.config import EngineConfig
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, timeless
from tests.engine.zero.inspecting import pretend_cpus_have_fp16, weights
from training.ppo_trainer import PPOConfig, PPOTrainer

STEPS = 3


class Parity(RewardSource):
    """The share of even tokens, times 2."""

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32."""
        even = (rollout.responses % 2 == 0) & rollout.response_mask
        return 2 * even.sum(-1) / rollout.response_mask.sum(-1)


def all_runs(folder: str, runs: dict[str, dict]) -> dict[str, dict]:
    """`one_run` of each set of arguments, by the same names."""
    pretend_cpus_have_fp16()
    return {name: one_run(folder, **arguments) for name, arguments in runs.items()}


def new_trainer(
    folder: str, stage: int, share: bool, config: str, dtype: str = "fp32", checkpointing: bool = False, warmup: int = 0
) -> PPOTrainer:
    """A trainer whose actor and critic train adapters on one base, in one engine or in two."""
    path = str(Path(folder) / config)
    spec = EngineSpec(
        actor_path=f"{folder}/actor",
        critic_path=None,
        with_reward_model=False,
        dtype=dtype,
        share_trunk=share,
        actor_lora=LoraSpec(dim=4, alpha=8.0, lr=2e-3, only=True),
        critic_lora=LoraSpec(dim=2, alpha=2.0, lr=1e-3, only=True),
        actor=EngineConfig("actor", stage, path=path),
        critic=EngineConfig("critic", 0 if share else stage, path=None if share else path),
        actor_optimizer=OptimizerSpec(lr=1e-3, weight_decay=0.1, max_grad_norm=0.3),
        critic_optimizer=OptimizerSpec(lr=2e-3, weight_decay=0.05, max_grad_norm=0.2),
        actor_gradient_checkpointing=checkpointing,
        critic_gradient_checkpointing=checkpointing and not share,
    )
    engine = RLHFEngine.from_pretrained(spec)
    return PPOTrainer(
        models=engine,
        rollouts=build_rollouts("replica", engine.actor, engine.tokenizer),
        reward=Parity(),
        dialect=DIALECT.override(ppo_epochs=2),
        config=PPOConfig(total_steps=STEPS, micro_batch_size=2, critic_warmup_steps=warmup),
        sampling=SAMPLING,
    )


def one_run(folder: str, **arguments) -> dict:
    """Three steps of several optimizer steps, each of several micro-batches."""
    trainer = new_trainer(folder, **arguments)
    found = {"metrics": [timeless(report.metrics) for report in trainer.fit(TinyPrompts(16))]}
    models = trainer.models
    found["weights"] = {role: weights(model) for role, model in models.trained.items()}
    found["engines"] = len(models.engines)
    found["steps"] = {role: model.scalars()["adam_steps"] for role, model in models.trained.items()}
    return found
