"""Run by ranks that take each other for two nodes: gathers and sums by node, and what they exchange across nodes."""

import os
from pathlib import Path
from unittest import mock

import torch

from engine import by_node, distributed
from engine.models.loading import empty_like, load_policy
from engine.rlhf_engine import EngineSpec, frozen_model
from engine.zero.config import EngineConfig
from engine.zero.gathering import copy_weights


def on_two_nodes(folder: str) -> dict:
    """What each way of gathering gives on this rank of four."""
    spec = EngineSpec(
        actor_path=str(Path(folder) / "actor"), critic_path=None, with_critic=False, with_reward_model=False
    )
    actor = frozen_model(load_policy, spec.actor_path, EngineConfig("actor", 3), spec)
    found = {"one node": by_node.gathers().node_size, "flat": _copied(actor.module)}
    uneven = {0: (0, 1), 1: (0, 3), 2: (1, 3), 3: (2, 3)}[distributed.rank()]
    with _places(*uneven):
        by_node.begin("all")
        found["uneven"] = by_node.gathers().node_size
    with _places(distributed.rank() % 2, 2):
        by_node.begin("nothing")
        found["nothing"] = by_node.gathers().node_size
        by_node.begin("all")
        found["two nodes"] = by_node.gathers().node_size
        found["by node"] = _copied(actor.module)
        apart = by_node.Gathers(apart=True)
    found["apart"] = apart.all_gather(torch.tensor([distributed.rank(), 7.0]))
    later = torch.empty(8)
    work = by_node.zero_gather(later, torch.tensor([distributed.rank(), 9.0]), async_op=True)
    work.wait()
    found["later"] = later
    sums = torch.empty(2)
    by_node.zero_reduce_scatter(sums, (distributed.rank() + 1) * torch.arange(8.0))
    found["sums"] = sums
    return found


def _copied(module) -> list[torch.Tensor]:
    copy = empty_like(module, distributed.device())
    copy_weights(module, copy)
    return [parameter.detach() for parameter in copy.parameters()]


def _places(local_rank: int, ranks: int):
    return mock.patch.dict(os.environ, {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks)})
