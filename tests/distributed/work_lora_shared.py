"""Run by ranks: actors and critics whose adapters alone train, which are the reference and the reward model too."""

from types import SimpleNamespace

import torch

from engine.algorithms import get_dialect
from engine.engine_spec import EngineSpec
from engine.experience import Rollout
from engine.models.loading import load_policy, load_scorer
from engine.models.lora import LoraSpec
from engine.reference import EngineReference
from engine.reward.base import RewardModel
from engine.rlhf_engine import RLHFEngine, frozen_model
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from tests.distributed.fills import counted_fills
from tests.distributed.tiny_points import load_point, save_point
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, engine_spec, timeless
from tests.engine.zero.inspecting import parameter_bytes, weights
from training.ppo_trainer import PPOConfig, PPOTrainer

LORA = LoraSpec(dim=4, alpha=8, lr=2e-3, only=True)
STEPS, SAVED_AFTER = 3, 2


def all_runs(folder: str, output: str, runs: dict[str, dict], dialects: list[str]) -> dict:
    """`one_run` of each set of arguments, by the same names; and "dialects", what `one_dialect` found of each."""
    found = {name: one_run(folder, f"{output}/{name}", **arguments) for name, arguments in runs.items()}
    return found | {"dialects": {name: one_dialect(folder, name) for name in dialects}}


def one_run(
    folder: str,
    output: str,
    stage: int,
    dtype: str = "fp32",
    backend: str = "replica",
    checkpointing: bool = False,
    shared: bool = True,
    resumed: bool = False,
) -> dict:
    """Three steps with an EMA; and if `resumed` a checkpoint after the second, and the last once more, in new
    engines, from there.

    shared: whether the engines of actor and critic play reference and reward model; otherwise these have their own.
    """
    spec = engine_spec(
        folder,
        stage,
        config=f"stage{stage}.json",
        dtype=dtype,
        reference=None,
        reward=None,
        actor_lora=LORA,
        critic_lora=LORA,
        ema_decay=0.5,
        actor_gradient_checkpointing=checkpointing,
        critic_gradient_checkpointing=checkpointing,
    )
    own = own_models(spec, folder)
    trainer = new_trainer(spec, backend, None if shared else own)
    engine, rollouts = trainer.models, trainer.rollouts
    result = {
        "models": [model.role for model in engine.engines],
        "bytes": {role: parameter_bytes(model) for role, model in engine.trained.items()},
        "before": {role: weights(model) for role, model in engine.trained.items()},
        "metrics": [],
        "fills": [],
    }
    feed = TinyPrompts(8)
    while trainer.steps_done < STEPS:
        with counted_fills() as fills:
            report = trainer.step(feed.prompts(trainer.steps_done))
        result["metrics"].append(timeless(report.metrics))
        result["fills"].append(len(fills))
        if resumed and report.step == SAVED_AFTER:
            save_point(output, engine, trainer.state_dict())
    rollout = report.batch.rollout
    result["copies"] = [sum(p.numel() for p in copy.parameters()) for copy in rollouts.copies._modules.values()]
    result["judged"] = judged(engine, own, rollout)
    with engine.ema.swapped():
        rollouts.generate(feed.prompts(0), SAMPLING)  # with the average merged, where there are copies
        result["averaged"] = judged(engine, own, rollout)
    rollouts.generate(feed.prompts(0), SAMPLING)
    result["judged after generating"] = judged(engine, own, rollout)
    result["after"] = {role: weights(model) for role, model in engine.trained.items()}
    if resumed:
        again = new_trainer(spec, backend)
        again.load_state_dict(load_point(output, again.models))
        result["resumed_metrics"] = [timeless(report.metrics) for report in again.fit(feed)]
        result["resumed"] = judged(again.models, own, rollout)
        result["resumed after"] = {role: weights(model) for role, model in again.models.trained.items()}
    return result


def own_models(spec: EngineSpec, folder: str) -> SimpleNamespace:
    """Reference and reward model in engines of their own, as they are without adapters."""

    def engine(role: str, load, path: str):
        stage = 3 if spec.actor.stage == 3 else 0
        config = EngineConfig(role, stage, path=f"{folder}/stage{stage}.json")
        return frozen_model(load, path, config, spec)

    return SimpleNamespace(
        reference=EngineReference(engine("reference", load_policy, spec.actor_path)),
        reward=RewardModel(engine("reward", load_scorer, spec.critic_path)),
    )


def new_trainer(spec: EngineSpec, backend: str, own: SimpleNamespace | None = None, **how) -> PPOTrainer:
    """A trainer of new engines, with these models for reference and reward in place of the shared ones."""
    engine = RLHFEngine.from_pretrained(spec)
    if own is not None:
        engine.reference, engine.reward = own.reference, own.reward
    how = {"dialect": DIALECT, "sampling": SAMPLING} | how
    return PPOTrainer(
        models=engine,
        rollouts=build_rollouts(backend, engine.actor, engine.tokenizer, others=engine.engines),
        config=PPOConfig(total_steps=STEPS, micro_batch_size=4),
        **how,
    )


@torch.no_grad()
def judged(engine: RLHFEngine, own: SimpleNamespace, rollout: Rollout) -> dict:
    """What actor, reference, critic and reward model say of a rollout, and what the untouched models do."""
    inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
    return {
        "reference": engine.reference.ref_logprobs(rollout, 0.8),
        "untouched reference": own.reference.ref_logprobs(rollout, 0.8),
        "actor": engine.actor(*inputs, response_length=rollout.response_length, temperature=0.8)[0],
        "values": engine.critic(*inputs),
        "scores": engine.reward.score(rollout),
        "untouched scores": own.reward.score(rollout),
        "token scores": own.reward.model(*inputs),
    }


def one_dialect(folder: str, name: str) -> dict:
    """Two steps of a dialect at stage 3, the models shared as far as it has them."""
    dialect = get_dialect(name).override(hydra_layers=0, actor_lr=1e-3, ppo_epochs=1, truncate_token="w05")
    dialect = dialect.override(critic_lr=1e-3) if dialect.has_critic else dialect
    spec = engine_spec(
        folder,
        3,
        config="stage3.json",
        reference=None,
        reward=None,
        actor_lora=LORA,
        critic_lora=LORA,
        with_critic=dialect.has_critic,
        pad_token=dialect.pad_token,
        reward_path=f"{folder}/reward",
        **({} if dialect.critic_start == "reward_model" else {"critic_path": None}),
    )
    own = own_models(engine_spec(folder, 3, config="stage3.json"), folder)
    sampling = SamplingConfig.of(
        dialect, SAMPLING.stop_token_ids, "fp32", max_new_tokens=12, seed=3, pad_token_id=SAMPLING.pad_token_id
    )
    trainer = new_trainer(spec, "replica", dialect=dialect, sampling=sampling)
    before = {role: weights(model) for role, model in trainer.models.trained.items()}
    reports = [trainer.step(TinyPrompts(8).prompts(step)) for step in range(2)]
    rollout = reports[-1].batch.rollout
    return {
        "models": [model.role for model in trainer.models.engines],
        "metrics": [timeless(report.metrics) for report in reports],
        "reference": trainer.models.reference.ref_logprobs(rollout, 0.8),
        "untouched reference": own.reference.ref_logprobs(rollout, 0.8),
        "before": before,
        "after": {role: weights(model) for role, model in trainer.models.trained.items()},
        "scores": trainer.models.reward.score(rollout),
        "untouched scores": own.reward.score(rollout),
    }
