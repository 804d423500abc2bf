"""All process groups of a run have its time-out, and not torch's own."""

import json
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world

from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from scripts.harness.ranks import TIMEOUT, run_ranks
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


def test_every_group_waits_as_long_as_the_worlds(folder):
    plain = json.loads((Path(folder) / "stage3.json").read_text())
    zero = plain["zero_optimization"] | {"zero_hpz_partition_size": 2}
    (Path(folder) / "own_hpz.json").write_text(json.dumps(plain | {"zero_optimization": zero}))
    configs = {"stage 2": (2, "stage2.json"), "stage 3": (3, "stage3.json"), "hpZ": (3, "own_hpz.json")}
    for found in run_ranks("tests.distributed.test_groups:time_outs", folder=folder, configs=configs):
        assert [name for name, groups in found.items() if not groups] == ["stage 3"]  # which has stage 2's
        assert {seconds for groups in found.values() for seconds in groups} == {TIMEOUT}
