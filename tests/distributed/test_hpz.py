"""hpZ on 4 ranks: engines with groups of 2, of 4 and without in one process, and what they compute."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.models.hydra import load_hydra
from engine.models.loading import load_policy
from engine.rlhf_engine import EngineSpec, OptimizerSpec, RLHFEngine, trained_model
from engine.zero.config import EngineConfig
from engine.zero.engines import TrainedModel
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import prompt_batch
from tests.distributed.work_engines import LR, RESPONSE, one_step, whole_rollout
from tests.engine.zero.inspecting import hpz_groups, second_copies, weights

ROWS = [0, 1, 2, 3]


def all_cases(folder: str, sizes: dict[str, int | None]) -> dict:
    """The groups of all engines of a run, by role; a policy with groups of 2 through its life, and without; and one
    with frozen layers that a restart point is read into.

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
    """A restart point with all numbers of a module times 1.5."""

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


SIZES = {"actor": 2, "critic": 4, "reference": 2, "reward": None}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    plain = json.loads((Path(folder) / "stage3.json").read_text())
    for size in (2, 4):
        zero = plain["zero_optimization"] | {"zero_hpz_partition_size": size}
        (Path(folder) / f"hpz{size}.json").write_text(json.dumps(plain | {"zero_optimization": zero}))
    return run_ranks("tests.distributed.test_hpz:all_cases", world=4, folder=folder, sizes=SIZES)


def test_each_engine_has_groups_of_its_own_size(ranks):
    for rank in ranks:
        assert rank["groups"] == {role: {size} for role, size in SIZES.items()}


def test_a_model_learns_the_same_as_without(ranks):
    for rank in ranks:
        for got, expected in zip(rank["hpz"]["logprobs"], rank["plain"]["logprobs"], strict=True):
            assert torch.equal(got, expected)
        for name, weight in rank["plain"]["weights"].items():
            assert torch.equal(rank["hpz"]["weights"][name], weight), name
        first, *_, swapped, last = rank["plain"]["logprobs"]
        assert (first - last).abs().max() > 0.05 and (swapped - last).abs().max() > 0.05  # the test would see it


def test_second_copies_go_when_the_weights_change(ranks):
    for rank in ranks:
        computed, *stepped = rank["hpz"]["copies"]
        assert computed > 10 and stepped == [0, 0] and set(rank["plain"]["copies"]) == {0}


def test_weights_that_do_not_train_are_those_of_the_restart_point(ranks):
    for rank in ranks:
        found = rank["frozen"]
        assert torch.allclose(found["after"], found["expected"], atol=1e-5)
        assert (found["after"] - found["before"]).abs().max() > 0.05
