"""Process groups: how long they wait, how, what lies in shared memory, and those of hierarchical partitions."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world

from engine import distributed
from engine.models.hydra import load_hydra
from engine.models.loading import load_policy
from engine.rlhf_engine import EngineSpec, OptimizerSpec, RLHFEngine, trained_model
from engine.rollout import build_rollouts
from engine.zero.config import EngineConfig
from engine.zero.engines import TrainedModel
from scripts.harness import free_port
from scripts.harness.ranks import TIMEOUT, run_ranks
from tests.distributed.tiny_run import engine_spec, prompt_batch
from tests.distributed.work_engines import LR, RESPONSE, one_step, whole_rollout
from tests.engine.zero.inspecting import hpz_groups, second_copies, weights


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
    modules |= {"reference": engine.reference.models[0], "reward": engine.rewards[0].models[0]}
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
    """Log-probs before and after such a checkpoint is read into a model whose lower layers do not train; and those that
    a plain module computes with its numbers."""
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
    return run_ranks("tests.distributed.test_groups:all_cases", world=4, folder=folder, sizes=SIZES)


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


RANK = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from engine import distributed
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2,
                        timeout=timedelta(seconds=3))
with distributed.waiting(timedelta(minutes=2)):
    if distributed.rank() == 0:
        time.sleep(6)
print("together", flush=True)
distributed.barrier()
"""


def test_the_others_wait_for_longer_than_the_groups_own_time():
    port, root = str(free_port()), Path(__file__).parents[2]
    ranks = [
        Popen([sys.executable, "-c", RANK, str(rank), port], cwd=root, stdout=PIPE, stderr=PIPE) for rank in (0, 1)
    ]
    found = [each.communicate(timeout=120) for each in ranks]
    assert [(each.returncode, said) for each, (said, _) in zip(ranks, found, strict=True)] == [(0, b"together\n")] * 2


SHARED_MEMORY, BUFFERS = Path("/dev/shm"), "deepspeed_allreduce_buffer"


def buffers_and_sums(end: str) -> dict:
    """The run's own buffers and a sum over the ranks; `end` is "normal", or "kill" for SIGKILL to itself."""
    port = os.environ["MASTER_PORT"]
    found = {
        "buffers": [path.name for path in SHARED_MEMORY.glob(f"{BUFFERS}_*_{port}_*")],
        "sum": distributed.all_reduce_sum(torch.tensor(distributed.rank() + 1)).item(),
    }
    distributed.barrier()
    if end == "kill":
        Path(os.environ["SEEN"], str(distributed.rank())).write_text(port)
        os.kill(os.getpid(), signal.SIGKILL)
    return found


@pytest.fixture
def launched(monkeypatch):
    """The environment as the deepspeed launcher sets it for two ranks, for which DeepSpeed would make buffers."""
    monkeypatch.setenv("LOCAL_SIZE", "2")


def left(port: str = "*") -> list[str]:
    return [path.name for path in SHARED_MEMORY.glob(f"{BUFFERS}_{os.getuid()}_127.0.0.1_{port}_*")]


def test_nothing_is_left_after_a_normal_end_or_sigkill(launched, tmp_path, monkeypatch):
    for rank in run_ranks("tests.distributed.test_groups:buffers_and_sums", end="normal"):
        assert rank == {"buffers": [], "sum": 3}
    monkeypatch.setenv("SEEN", str(tmp_path))
    with pytest.raises(RuntimeError, match="failed on rank"):
        run_ranks("tests.distributed.test_groups:buffers_and_sums", end="kill")
    assert left(port=(tmp_path / "0").read_text()) == []
