"""Checkpoints of several ranks: writes that fail, folders that ranks share, other layouts of ranks and stages."""

import contextlib
import errno
import json
import os
import socket
import tempfile
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from engine import distributed
from engine.errors import UserError
from engine.experience import position_ids
from engine.models.hydra import load_hydra
from engine.models.loading import load_policy
from engine.models.lora import LoraSpec
from engine.reference import EMA
from engine.rlhf_engine import EngineSpec, OptimizerSpec, trained_model
from engine.zero.config import EngineConfig
from engine.zero.engines import TrainedModel
from engine.zero.training_state import SCALER_COUNTERS, Shard
from scripts.harness.models import VOCABULARY, make_causal_lm
from scripts.harness.ranks import run_ranks
from tests.engine.zero.inspecting import masters, moments, pretend_cpus_have_fp16, weights
from tests.engine.zero.shard_memory import InMemory, whole
from tests.training.checkpoints.tiny_checkpoints import TinyRun, flip_bit
from training.checkpoints import files, saving
from training.checkpoints.resuming import Checkpoint
from training.runtime import output_folder


def failed_and_tried_again(folder: str) -> dict:
    """Steps 1 to 4, each with a checkpoint; rank 1's disk is full at step 2, and the next try is due at once."""
    os.environ["LOCAL_SIZE"] = "1"  # each rank on a host of its own
    write, run = saving.write_shards, TinyRun(Path(folder), steps=1)
    saving.RETRY_AFTER = 0.0

    def write_or_fail(path, shards):
        if run.step == 2 and distributed.rank() == 1:
            write(path, shards)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, shards)

    saving.write_shards = write_or_fail
    there = {}
    for step in range(1, 5):
        run.train_to(step)
        distributed.barrier()
        there[step] = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
        distributed.barrier()
    saving.write_shards = write
    return {"there": there, "said": run.said, "newest": str(run.checkpoints.newest)}


def looked_at(folder: str) -> dict:
    """What --resume makes of the points of `failed_and_tried_again`, each file of the newest damaged in turn; how many
    files each rank hashed; and what is said where rank 1 does not see the folder."""
    newest = Path(folder) / "checkpoints" / "step_000004"
    hashed, problem = [], files._problem

    def counted(path, record):
        hashed.append(path.name)
        return problem(path, record)

    files._problem = counted
    found = {"whole": find(folder), "hashed": sorted(hashed)}
    for name in sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()):
        for damaging in (True, False):
            if distributed.is_main():
                flip_bit(newest / name)
            distributed.barrier()
            if damaging:
                found[name] = find(folder)
            distributed.barrier()
    if distributed.rank() == 1:
        folder = f"{folder}_of_another_node"
        files.Path.is_dir = lambda path: False
    found["unseen"] = find(str(newest))
    return found


def find(path: str) -> tuple[str, ...]:
    """The point's name and what was passed over, or the message."""
    try:
        checkpoint = Checkpoint.find(path, "elsewhere")
    except UserError as error:
        return ("refused", str(error))
    return (checkpoint.folder.name, *checkpoint.passed_over)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def written(run_folder) -> list[dict]:
    return run_ranks("tests.distributed.test_checkpoints:failed_and_tried_again", folder=run_folder)


def test_a_write_that_fails_on_one_rank_leaves_the_run_going_and_the_older_points(written):
    for rank in written:
        points = [f"step_{step:06d}" for step in (1, 3, 4)]
        assert rank["there"] == {1: points[:1], 2: points[:1], 3: points[:2], 4: points}
        assert rank["newest"].endswith("step_000004")
    failed = [line for line in written[0]["said"] if "NOT WRITTEN" in line]
    assert len(failed) == 1
    assert f"of step 2: on {socket.gethostname()}: rank 1: [Errno 28] No space left on device" in failed[0]
    assert written[1]["said"] == []


def test_files_are_hashed_once_over_all_ranks_and_a_damaged_one_is_known_to_all(run_folder, written):
    one, two = run_ranks("tests.distributed.test_checkpoints:looked_at", folder=run_folder)
    names = ["config.json", "rank_00000.safetensors", "rank_00001.safetensors", "trainer_state.json"]
    assert sorted(one.pop("hashed") + two.pop("hashed")) == names
    assert one == two and one.pop("whole") == ("step_000004",)
    said, unseen = one.pop("unseen")
    there = f"step_000004: not there for rank 1 on {socket.gethostname()}. Put the checkpoint where every node"
    assert said == "refused" and there in unseen
    assert len(one) == 5
    for name, (used, passed_over) in one.items():
        assert used == "step_000003" and "step_000004 is damaged" in passed_over and name in passed_over


def looked(folder: str) -> dict[str, tuple[str | None, list[str]]]:
    """By case: what is raised, and what then stands in this rank's folder."""
    root, found = Path(folder), {}
    own = root / str(distributed.rank())
    found["shared"] = _raised(root / "shared")
    # A network folder that shows after a while what another host has written.
    late = root / "late" if distributed.is_main() else root / "seen late"
    if not distributed.is_main():
        threading.Timer(0.5, lambda: late.symlink_to(root / "late")).start()
    found["late"] = _raised(late)
    output_folder.PATIENCE = 0.3
    found["apart"] = _raised(own / "new")
    if not distributed.is_main():  # what another run has left on this disk
        output_folder.take_lock(own)
    found["with another's lock"] = _raised(own)
    output_folder.release_lock()
    full = OSError(errno.EROFS, "Read-only file system")
    refused = mock.patch.object(tempfile, "TemporaryFile", side_effect=None if distributed.is_main() else full)
    with refused:
        found["read-only"] = _raised(root / "shared")
    return found


def _raised(folder: Path) -> tuple[str | None, list[str]]:
    if distributed.is_main():
        output_folder.take_lock(folder)
    raised = None
    try:
        output_folder.check_shared(str(folder))
    except UserError as error:
        raised = str(error)
    left = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not distributed.is_main() and raised is None:  # rank 0 still holds the folder
        with contextlib.suppress(UserError):
            output_folder.take_lock(folder)
            left.append("taken")
    distributed.barrier()
    if distributed.is_main():
        output_folder.release_lock()
    distributed.barrier()
    return raised, left


def test_a_rank_that_does_not_share_the_folder_is_named_on_all(tmp_path):
    host = socket.gethostname()

    def message(written, looks_in, problem):
        return (
            f"--output_dir {{given}} is not one folder for all ranks. Rank 0 on {host} writes in {written}; {host} "
            f"(rank 1), which looks in {looks_in}, {problem}. Models and checkpoints need a folder that all nodes "
            "share: give one on a network file system, mounted at the same path on all of them and writable on each."
        )

    one, two = tmp_path / "0", tmp_path / "1"
    for rank, found in enumerate(run_ranks("tests.distributed.test_checkpoints:looked", folder=str(tmp_path))):
        own = tmp_path / str(rank)
        assert found["shared"] == found["late"] == (None, ["run.lock"])
        raised, left = found["apart"]
        assert raised == message(one / "new", two / "new", "does not see that").format(given=own / "new")
        assert left == (["run.lock"] if rank == 0 else [])
        raised, left = found["with another's lock"]
        assert raised == message(one, two, "does not see that").format(given=own)
        assert "run.lock" in left
        raised, left = found["read-only"]
        shared = tmp_path / "shared"
        assert raised == message(shared, shared, "cannot write there (Read-only file system)").format(given=shared)
        assert left == ["run.lock"]


LR, ROWS, LENGTH = 1e-3, 6, 9


def hop(folder: str, output: str, runs: dict[str, dict], number: int, before: int) -> dict[str, dict]:
    """Each run's hop of this number, in its layout: what the last hop left is loaded, `before` steps are trained, the
    state is written, and one step more is trained, which the next hop repeats."""
    pretend_cpus_have_fp16()
    return {name: _one(folder, f"{output}/{name}", number, before, **run) for name, run in runs.items()}


def _one(
    folder: str, output: str, number: int, before: int, layouts: list, dtype: str, starts=("actor", "other"), **made
) -> dict:
    stage, config = layouts[number]
    model = build(f"{folder}/{starts[min(number, 1)]}", stage, f"{folder}/{config}", dtype, **made)
    ema, found, step = EMA(model, 0.9), {}, 0
    if number:
        found["fresh"] = measured(model, ema)
        steps = torch.load(f"{output}/hop_{number - 1}_rank_0.pt", weights_only=False)["step"]
        source, found["asked"] = _load(model, ema, f"{output}/hop_{number - 1}"), None
        found["loaded"], found["asked"], step = measured(model, ema), source.asked, steps
        found["numbers"] = sum(tensor.numel() for tensor in source.tensors.values())
    found["losses"] = [one_step(model, ema, step + index) for index in range(before)]
    step += before
    found["saved"] = measured(model, ema)
    _save(model, ema, f"{output}/hop_{number}", step)
    found["losses"] += [one_step(model, ema, step + index) for index in range(2)]
    return found


def build(
    path: str,
    stage: int,
    config: str,
    dtype: str,
    hydra_layers: int = 0,
    form: str = "adamw",
    decay: float = 0.1,
    lora: dict | None = None,
) -> TrainedModel:
    """An actor whose matrices decay, unless its Adam is TensorFlow's; with adapters by the fields of `lora`."""
    spec = EngineSpec(actor_path=path, critic_path="", dtype=dtype)
    load = partial(load_hydra, layers=hydra_layers) if hydra_layers else load_policy
    adam = OptimizerSpec(lr=LR, form=form, weight_decay=0.0 if form == "tf_adam" else decay)
    return trained_model(
        load, path, EngineConfig("actor", stage, path=config), adam, spec, lora=lora and LoraSpec(**lora)
    )


def one_step(model: TrainedModel, ema: EMA, number: int) -> float:
    """Train a step on its rows, a row a pass, so that each row's numbers do not depend on who computes them; returns
    the loss over all ranks."""
    rows = torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))
    own, total = rows[distributed.rank_share(ROWS)], torch.zeros(())
    for index, row in enumerate(own):
        tokens = row.unsqueeze(0)
        mask = torch.ones_like(tokens)
        logprobs, _ = model(tokens, mask, position_ids(mask), response_length=LENGTH - 1)
        loss = -logprobs.sum() / (ROWS * (LENGTH - 1))
        model.backward(loss, last=index == len(own) - 1)
        total += loss.detach()
    overflow = model.overflowed()
    if model.step(LR, overflow):
        ema.update()
    return distributed.all_reduce_sum(total.double()).item()


def measured(model: TrainedModel, ema: EMA) -> dict:
    """Everything that a restart is to bring back, in full, as DeepSpeed's own functions find it."""
    found = {
        "weights": weights(model),
        "masters": masters(model),
        "counters": model.scalars(),
        "loss scale": model.loss_scale,
    }
    if found["counters"]["adam_steps"]:
        found |= {moment: moments(model, moment) for moment in ("exp_avg", "exp_avg_sq")}
    if hasattr(model.module, "branch"):
        found["branch"] = weights(SimpleNamespace(module=SimpleNamespace(model=model.module.branch)))
    with ema.swapped():
        found["ema"] = masters(model)
    return found


def _save(model: TrainedModel, ema: EMA, path: str, step: int) -> None:
    shards = [
        Shard(shard.name, shard.shape, shard.start, shard.values.clone()) for shard in model.shards() + ema.shards()
    ]
    state = {"shards": shards, "scalars": model.scalars(), "step": step}
    Path(path).parent.mkdir(exist_ok=True)
    torch.save(state, f"{path}_rank_{distributed.rank()}.pt")
    distributed.barrier()


def _load(model: TrainedModel, ema: EMA, path: str) -> InMemory:
    files = sorted(Path(path).parent.glob(Path(path).name + "_rank_*.pt"))
    states = [torch.load(file, weights_only=False) for file in files]
    assert all(state["scalars"] == states[0]["scalars"] for state in states)
    source = InMemory(whole([shard for state in states for shard in state["shards"]]))
    version = model.version
    model.load_shards(source, states[0]["scalars"])
    ema.load_shards(source)
    assert model.version > version
    return source


RANKS, BEFORE = (2, 1, 3), (3, 1, 0)  # of each hop: ranks, and steps trained before it is left
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CHANGED = {
    "stage1_aligned": (1, {"round_robin_gradients": True, "parameter_alignment": True}),
    "stage2_round_robin": (2, {"round_robin_gradients": True}),
    "stage2_offload": (2, OFFLOAD),
    "stage3_groups": (3, {"sub_group_size": 2000}),
    "stage3_offload": (3, OFFLOAD | {"offload_param": {"device": "cpu"}}),
}


def run(*layouts: str, dtype: str = "fp32", **made) -> dict:
    """layouts: a DeepSpeed JSON for each hop."""
    return {"layouts": [(int(name[5]), f"{name}.json") for name in layouts], "dtype": dtype, **made}


TIED = ("tied", "other_tied")
RUNS = {
    "fp32": run("stage3", "stage2", "stage3"),
    "bf16": run("stage3", "stage2", "stage3", dtype="bf16"),
    "replicated": run("stage0", "stage1_aligned", "stage0"),
    "replicated_bf16": run("stage1_aligned", "stage0", "stage2_round_robin", dtype="bf16"),
    "groups": run("stage2_round_robin", "stage3_groups", "stage3_offload"),
    "tied": run("stage3_persistent", "stage2_offload", "stage3_persistent", dtype="bf16", starts=TIED),
    "hydra": run("stage3", "stage0", "stage2", hydra_layers=1, form="tf_adam", starts=TIED),
    "lora": run("stage3", "stage1_aligned", "stage2", starts=("actor", "actor"), lora={"dim": 2, "only": True}),
    "fp16": run("stage3_growing", "stage0_growing", "stage2_growing", dtype="fp16", hydra_layers=1),
}
FULL = ("weights", "masters", "exp_avg", "exp_avg_sq", "ema")


@pytest.fixture(scope="module")
def hops(folder, output) -> list[list[dict]]:
    """What each rank of each hop found."""
    for seed, name, tied in ((7, "other", False), (8, "other_tied", True)):
        make_causal_lm(Path(folder) / name, "llama", seed=seed, tied=tied)
    for name, (stage, changed) in CHANGED.items():
        config = json.loads((Path(folder) / f"stage{stage}.json").read_text())
        config["zero_optimization"] |= changed
        (Path(folder) / f"{name}.json").write_text(json.dumps(config))
    target = "tests.distributed.test_checkpoints:hop"
    return [
        run_ranks(target, world=ranks, folder=folder, output=output, runs=RUNS, number=number, before=BEFORE[number])
        for number, ranks in enumerate(RANKS)
    ]


def assert_equal(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for kind, tensors in expected.items():
        if kind in ("counters", "loss scale"):
            continue
        for name, tensor in tensors.items():
            assert torch.equal(got[kind][name], tensor), (kind, name)


@pytest.mark.parametrize("name", RUNS)
def test_everything_is_bit_by_bit_what_the_layout_before_left(hops, name):
    for before, after in pairwise(hops):
        left = before[0][name]["saved"]
        for rank in after:
            fresh, loaded = rank[name]["fresh"], rank[name]["loaded"]
            assert_equal(loaded, left)
            assert set(FULL) <= loaded.keys()
            for kind in ("weights", "masters", "ema"):
                assert any(not torch.equal(fresh[kind][weight], loaded[kind][weight]) for weight in loaded[kind])
            assert loaded["counters"]["adam_steps"] == (3 if before is hops[0] else 4)


@pytest.mark.parametrize("name", [name for name in RUNS if RUNS[name]["dtype"] != "fp32"])
def test_the_16_bit_weights_are_the_rounded_masters(hops, name):
    for hop in hops[1:]:
        loaded = hop[-1][name]["loaded"]
        for weight, master in loaded["masters"].items():
            assert loaded["weights"][weight].dtype == (torch.float16 if name == "fp16" else torch.bfloat16)
            assert torch.equal(loaded["weights"][weight], master.to(loaded["weights"][weight].dtype))


@pytest.mark.parametrize("name", RUNS)
def test_a_replayed_step_has_the_loss_that_the_layout_before_found(hops, name):
    """The first from the same weights; the second after an update by the same moments, in 16 bits as they round."""
    for before, after in pairwise(hops):
        expected = before[0][name]["losses"][-2:]
        for rank in after:
            first, second = rank[name]["losses"][:2]
            assert first == pytest.approx(expected[0], rel=1e-5)
            assert second == pytest.approx(expected[1], rel=1e-5 if RUNS[name]["dtype"] == "fp32" else 1e-2)
            assert abs(first - second) > 1e-3


def test_the_loss_scale_goes_on_with_those_counters_that_both_stages_have(hops):
    for before, after in pairwise(hops):
        left, loaded = before[0]["fp16"]["saved"], after[-1]["fp16"]["loaded"]
        assert loaded["loss scale"] == left["loss scale"] > 2**8
        shared = loaded["counters"]["loss_scale"].keys() & left["counters"]["loss_scale"].keys()
        assert len(shared) == len(SCALER_COUNTERS) - 1
        for counter in shared:
            assert loaded["counters"]["loss_scale"][counter] == left["counters"]["loss_scale"][counter]


@pytest.mark.parametrize("name", RUNS)
def test_a_rank_reads_no_more_than_it_holds(hops, name):
    """Of a weight and its moments a third on each of 3 ranks at stages 1 to 3, one after the other; all at stage 0."""
    asked = [rank[name]["asked"] for rank in hops[2]]
    stage = RUNS[name]["layouts"][2][0]
    tensors = hops[2][0][name]["loaded"]["masters"]
    for kind in ("weights", "exp_avg", "exp_avg_sq", "ema"):
        for weight, tensor in tensors.items():
            numbers = [rank[f"{kind}/model.{weight}"] for rank in asked]
            if stage == 0:
                assert numbers == [tensor.numel()] * 3
            else:
                assert sum(numbers) == tensor.numel()
            if stage == 3:
                assert max(numbers) == -(-tensor.numel() // 3)
