"""Tiny engines, prompts and trainers for the ranks of a test, and what their weights are."""

from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from torch import Tensor

from engine import distributed
from engine.algorithms import Dialect
from engine.experience import PromptBatch
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from engine.zero.engines import FrozenModel, TrainedModel
from tests.tiny_models import PAD, VOCABULARY
from training.data.prompts import collate_prompts
from training.ppo_trainer import PPOConfig, PPOTrainer

DIALECT = Dialect(name="tiny", actor_lr=1e-3, critic_lr=1e-3, warmup_steps=2, ppo_epochs=1, ema_decay=0.9)
SAMPLING = SamplingConfig(max_new_tokens=12, pad_token_id=PAD, stop_token_ids=(2, 7, 11, 19, 23), seed=3)


def engine_spec(
    folder: str, stage: int, *, dtype: str = "fp32", actor: str = "actor", config: str | None = None, **fields
) -> EngineSpec:
    """Trained engines at this stage, frozen ones at 3 where it is 3, else at 0.

    `actor`, `config`: names in `folder` of a model and of a DeepSpeed JSON, the latter for all engines of this stage.
    """
    path = config and str(Path(folder) / config)
    choices = {role: EngineConfig(role, stage, path=path) for role in ("actor", "critic")}
    if stage == 3:
        choices |= {role: EngineConfig(role, stage, path=path) for role in ("reference", "reward")}
    return EngineSpec(
        actor_path=str(Path(folder) / actor),
        critic_path=str(Path(folder) / "reward"),
        dtype=dtype,
        **(choices | fields),
    )


def build_trainer(
    spec: EngineSpec,
    *,
    dialect: Dialect = DIALECT,
    sampling: SamplingConfig = SAMPLING,
    backend: str = "replica",
    **config,
) -> PPOTrainer:
    """New engines, and a trainer of `total_steps` 3 and `micro_batch_size` 4 unless `config` says otherwise."""
    engine = RLHFEngine.from_pretrained(spec)
    config = {"total_steps": 3, "micro_batch_size": 4} | config
    return PPOTrainer(
        engine=engine,
        rollouts=build_rollouts(backend, engine.actor, engine.tokenizer),
        dialect=dialect,
        config=PPOConfig(**config),
        sampling=sampling,
    )


class TinyPrompts:
    """This rank's share of `per_step` prompts of 2 to 9 tokens a step."""

    def __init__(self, per_step: int):
        self.per_step = per_step

    def prompts(self, step: int) -> PromptBatch:
        """The prompts of a step, counted from 0."""
        indices = range(step * self.per_step, (step + 1) * self.per_step)
        return prompt_batch(list(indices[distributed.rank_share(self.per_step)]))


def prompt_tokens(index: int) -> list[int]:
    """2 to 9 tokens, the same wherever and whenever this prompt is asked for."""
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(2, 10, (), generator=generator))
    return torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()


def prompt_batch(indices: list[int]) -> PromptBatch:
    """These prompts, left-padded."""
    return collate_prompts(
        [prompt_tokens(index) for index in indices],
        torch.tensor(indices),
        torch.zeros(len(indices), dtype=torch.int64),
        PAD,
    )


def weights(model: TrainedModel | FrozenModel) -> dict[str, Tensor]:
    """Copies of the module's full weights, in its own dtype, by Hugging Face's names (all ranks call this)."""
    named = dict(model.module.model.named_parameters())
    away = [p for p in named.values() if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
    with deepspeed.zero.GatheredParameters(away, enabled=bool(away)):
        return {name: parameter.detach().clone() for name, parameter in named.items()}


def masters(model: TrainedModel) -> dict[str, Tensor]:
    """Copies of the full float32 weights that the optimizer updates (all ranks call this)."""
    named = model.module.model.named_parameters()
    if model.stage > 0:
        return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named}
    return {name: _master(model, parameter).detach().clone() for name, parameter in named}


def momenta(model: TrainedModel) -> dict[str, Tensor]:
    """Copies of Adam's full first moments (all ranks call this)."""
    named = model.module.model.named_parameters()
    if model.stage in (1, 2):  # DeepSpeed links them when the first group has been stepped, and the others have none
        model.engine.optimizer._hp_optimizer_states_linked = False
        model.engine.optimizer._lazy_init_hp_params_optimizer_state()
    if model.stage > 0:
        return {name: safe_get_full_optimizer_state(parameter, "exp_avg").clone() for name, parameter in named}
    state = model.engine.optimizer.state
    return {name: state[_master(model, parameter)]["exp_avg"].clone() for name, parameter in named}


def _master(model: TrainedModel, parameter: Tensor) -> Tensor:
    """At stage 0: the float32 copy that the optimizer holds of a parameter, or the parameter itself."""
    optimizer = model.engine.optimizer
    halves = [p for group in getattr(optimizer, "fp16_groups", []) for p in group]
    wholes = [p for group in getattr(optimizer, "fp32_groups", []) for p in group]
    return next((whole for half, whole in zip(halves, wholes, strict=True) if half is parameter), parameter)


def gradients(model: TrainedModel) -> dict[str, Tensor]:
    """Copies of the full gradients between the last backward and the step (all ranks call this)."""

    def read(parameter):
        return parameter.grad if model.stage == 0 else safe_get_full_grad(parameter)

    return {name: read(parameter).detach().clone() for name, parameter in model.module.model.named_parameters()}


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that do not depend on the machine."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("time/", "memory/")) and name != "rollout/tokens_per_second"
    }
