"""Run by ranks: engines whose weights groups of ranks hold a second time (hpZ), beside the same without."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.models.hydra import load_hydra
from engine.models.loading import load_policy
from engine.rlhf_engine import EngineSpec, OptimizerSpec, RLHFEngine, trained_model
from engine.zero.config import EngineConfig
from engine.zero.engines import TrainedModel
from tests.distributed.tiny_run import prompt_batch
from tests.distributed.work_engines import LR, RESPONSE, one_step, whole_rollout
from tests.engine.zero.inspecting import hpz_groups, second_copies, weights

ROWS = [0, 1, 2, 3]


def all_cases(folder: str, sizes: dict[str, int | None]) -> dict:
    """The groups of all engines of a run, by role; a policy with groups of 2 through its life, and without; and one
    with frozen layers that a checkpoint is read into.

    sizes: by role, the ranks of a group, of the file hpz2.json or hpz4.json in `folder`; None for stage3.json.
    """
    spec = EngineSpec(
        actor_path=f"{folder}/actor",
        critic_path=f"{folder}/reward",
        **{role: EngineConfig(role, 3, path=_file(folder, size)) for role, size in sizes.items()},
    )
    engine = RLHFEngine.from_pretrained(spec)
    modules = {"actor": engine.actor, "critic": engine.critic}
    modules |= {"reference": engine.reference.models[0], "reward": engine.reward.models[0]}
    plain = replace(spec, actor=EngineConfig("actor", 3, path=_file(folder, None)))
    return {
        "groups": {role: hpz_groups(model.module) for role, model in modules.items()},
        "hpz": _life(engine.actor),
        "plain": _life(trained_model(load_policy, plain.actor_path, plain.actor, OptimizerSpec(lr=LR), plain)),
        "frozen": _read_into(folder, spec),
    }


def _file(folder: str, size: int | None) -> str:
    return str(Path(folder) / ("stage3.json" if size is None else f"hpz{size}.json"))


@torch.no_grad()
def _logprobs(model: TrainedModel | nn.Module) -> Tensor:
    rows = whole_rollout(prompt_batch(ROWS))
    return model(rows.sequences, rows.attention_mask, rows.position_ids, response_length=RESPONSE)[0].clone()


def _life(model: TrainedModel) -> dict:
    """Log-probs of two steps, between them and behind, and with other weights swapped in; the weights at the end."""
    found: dict = {"logprobs": [_logprobs(model)], "copies": [second_copies(model.module)]}
    for _ in range(2):
        one_step(model, whole_rollout(prompt_batch(ROWS)))
        found["copies"].append(second_copies(model.module))
        found["logprobs"].append(_logprobs(model))
    with model.swapped([shard * 1.5 for shard in model.master_shards()]):
        found["logprobs"].append(_logprobs(model))
    found["logprobs"].append(_logprobs(model))
    return found | {"weights": weights(model)}


class _Larger:
    """A checkpoint with all numbers of a module times 1.5."""

    def __init__(self, module: nn.Module):
        self.tensors = {
            f"{'weights' if parameter.requires_grad else 'frozen'}/{name}": 1.5 * parameter.detach()
            for name, parameter in module.named_parameters()
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of each tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Numbers of one of them."""
        out.copy_(self.tensors[name].view(-1)[start : start + len(out)])


def _read_into(folder: str, spec: EngineSpec) -> dict:
    """Log-probs before and after such a point is read into a model whose lower layers do not train; and those that a
    plain module computes with its numbers."""
    model = trained_model(partial(load_hydra, layers=1), spec.actor_path, spec.actor, OptimizerSpec(lr=LR), spec)
    whole = load_hydra(spec.actor_path, torch.float32, layers=1)
    before, point = _logprobs(model), _Larger(whole)
    model.load_shards(point, {"adam_steps": 0, "loss_scale": {}})
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            kind = "weights" if parameter.requires_grad else "frozen"
            parameter.copy_(point.tensors[f"{kind}/{name}"])
    return {"before": before, "after": _logprobs(model), "expected": _logprobs(whole)}
