"""Run by ranks: models that start from adapter folders, merged and gone on with, and what is saved of them."""

from dataclasses import replace
from pathlib import Path

import torch

from engine.experience import position_ids
from engine.models.lora import LoraSpec
from engine.models.saving import merged_weights
from engine.rlhf_engine import RLHFEngine
from engine.zero.gathering import full_shape, set_parameter
from tests.distributed.tiny_run import engine_spec
from training.runtime import model_folders

SEQUENCES = torch.arange(4, 20).view(2, 8)


def loaded_and_saved(folder: str, actor: str, reward: str, dim: int, output: str, stages: list[int]) -> dict:
    """By stage, what four engines compute that start from adapters: merged; gone on with; and after a change of the
    factors, which is saved in `output`."""
    return {stage: _at(folder, actor, reward, dim, f"{output}/{stage}", stage) for stage in stages}


def _at(folder: str, actor: str, reward: str, dim: int, output: str, stage: int) -> dict:
    spec = replace(engine_spec(folder, stage, config=f"stage{stage}.json"), actor_path=actor, critic_path=reward)
    found = {"merged": _computed(RLHFEngine.from_pretrained(spec))}
    lora = LoraSpec(dim=dim, only=True)
    spec = replace(spec, actor_lora=lora, critic_lora=lora, reference=None, reward=None)
    models = RLHFEngine.from_pretrained(spec)
    found["gone on with"] = _computed(models)
    for model in models.trained.values():
        for _, b in model.module.adapters.factors().values():
            set_parameter(b, torch.full(full_shape(b), 0.1))
        model.version += 1
    found["changed"] = _computed(models)
    found["merged while training goes on"] = {
        name: weight.clone() for name, weight in merged_weights(models.actor.module)
    }
    for role, model in models.trained.items():
        model_folders.save_forms(model, models.tokenizer, Path(output), role)
    return found


@torch.no_grad()
def _computed(models: RLHFEngine) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(SEQUENCES)
    inputs = (SEQUENCES, mask, position_ids(mask))
    return {
        "actor": models.actor(*inputs, response_length=5)[0],
        "reference": models.reference.model(*inputs, response_length=5)[0],
        "critic": models.critic(*inputs),
        "reward": models.reward.model(*inputs),
    }
