"""Run by ranks: the process groups of a run, whoever makes them, and how long their calls wait."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world

from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from tests.distributed.tiny_run import engine_spec


def time_outs(folder: str, configs: dict[str, tuple[int, str]]) -> dict[str, list[float]]:
    """Seconds for each process group, by what was made last before it. configs: name -> stage and file in `folder`."""
    seen, found = set(), {}

    def note(name: str) -> None:
        new = [group for group in _world.pg_map if group not in seen]
        seen.update(new)
        options = [group._get_backend(torch.device("cpu")).options for group in new]
        found[name] = [each._timeout.total_seconds() for each in options]

    note("world")
    for name, (stage, config) in configs.items():
        models = RLHFEngine.from_pretrained(engine_spec(folder, stage, config=config))
        note(name)
    build_rollouts("replica", models.actor, models.tokenizer, others=models.engines, tensor_parallel=2)
    note("copies that ranks hold together")
    init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "other"))
    note("a mesh")
    return found
