"""A run that goes on from a checkpoint, in new processes, is the run that was never interrupted."""

from pathlib import Path

import pytest
import torch

from scripts.harness.programs import snapshot
from tests.distributed.harness import run_ranks
from tests.distributed.work_restart import SAVED_AFTER, STEPS
from training.checkpoints import resuming
from training.checkpoints.export import export
from training.checkpoints.files import ShardFiles

RUNS = {
    f"{dtype}_{stage}{suffix}": {"stage": stage, "config": f"stage{stage}{suffix}.json", "dtype": dtype}
    for dtype, stage, suffix in (
        ("fp32", 0, ""),
        ("fp32", 2, ""),
        ("fp32", 3, ""),
        ("fp32", 3, "_persistent"),
        ("bf16", 0, ""),
        ("bf16", 3, ""),
        ("fp16", 0, "_growing"),
        ("fp16", 2, "_growing"),
        ("fp16", 3, "_growing"),
    )
}
STEERED = {
    "kl_controller": "adaptive",
    "kl_target": 0.1,
    "kl_horizon": 100.0,
    "score_scaling": "running",
    "early_stop_kl": 1e-3,
    "lr_per": "step",
}
RUNS["steered"] = {"stage": 2, "config": "stage2.json", "dtype": "fp32", "changed": STEERED}
RUNS["rloo"] = {
    "stage": 3,
    "config": "stage3.json",
    "dtype": "fp32",
    "changed": {
        "advantage_estimator": "rloo",
        "critic_start": "none",
        "critic_lr": 0.0,
        "samples_per_prompt": 2,
        "ratio": "response",
        "score_scaling": "first_batch",
    },
}
RUNS["apart"] = {
    "stage": 3,
    "config": "stage3.json",
    "dtype": "fp32",
    "changed": {"critic_epochs": 3, "critic_mini_batches": 1, "value_lam": 1.0, "length_adaptive_alpha": 0.5},
}
RUNS["lora"] = {"stage": 3, "config": "stage3.json", "dtype": "bf16", "lora": {"dim": 4, "lr": 1e-2}}


@pytest.fixture(scope="module")
def whole(folder, output) -> list[dict]:
    return run_ranks("tests.distributed.work_restart:uninterrupted", folder=folder, output=output, runs=RUNS)


@pytest.fixture(scope="module")
def resumed(folder, output, whole) -> list[dict]:
    return run_ranks("tests.distributed.work_restart:resumed", folder=folder, output=output, runs=RUNS)


def assert_same_state(got: dict, expected: dict) -> None:
    assert got["counters"] == expected["counters"]
    assert got["tensors"].keys() == expected["tensors"].keys()
    for kind, tensors in expected["tensors"].items():
        for name, tensor in tensors.items():
            assert torch.equal(got["tensors"][kind][name], tensor), (kind, name)


@pytest.mark.parametrize("run", RUNS)
def test_everything_is_loaded_as_it_was_saved(whole, resumed, run):
    for one, other in zip(whole, resumed):
        assert_same_state(other[run]["loaded"], one[run]["saved"])
        fresh, loaded = (other[run][when]["tensors"] for when in ("fresh", "loaded"))
        for kind in ["ema", "actor masters", *(["critic masters"] if run != "rloo" else [])]:
            assert any(not torch.equal(fresh[kind][name], loaded[kind][name]) for name in fresh[kind])


@pytest.mark.parametrize("run", RUNS)
def test_an_export_is_what_the_run_would_have_saved(whole, output, run, tmp_path, monkeypatch):
    for load in ("load_policy", "new_scorer"):  # which would have a whole model in memory
        monkeypatch.setattr(resuming, load, None)
    point = str(Path(output) / run)
    roles = ["actor"] if run == "rloo" else ["actor", "critic"]
    exported = {role: export(point, str(tmp_path / role), model=role) for role in roles}
    exported["actor_ema"] = export(point, str(tmp_path / "actor_ema"), ema=True)
    if run == "lora":
        exported |= {
            f"{role}_adapter": export(point, str(tmp_path / f"{role}_adapter"), model=role, adapter=True)
            for role in roles
        }
        exported["actor_ema_adapter"] = export(point, str(tmp_path / "ema"), ema=True, adapter=True)
        assert all((Path(point) / "saved" / name).is_dir() for name in exported)
    for role, folder in exported.items():
        assert snapshot(folder) == snapshot(Path(point) / "saved" / role)


def test_the_points_of_a_lora_run_hold_what_trains_and_not_the_base(whole, output):
    names = set(ShardFiles(Path(output) / "lora" / "checkpoints" / "step_000002" / "actor").shapes())
    assert names and all(".lora_A.actor." in name or ".lora_B.actor." in name for name in names)
    names = set(ShardFiles(Path(output) / "lora" / "checkpoints" / "step_000002" / "critic").shapes())
    assert {name for name in names if ".lora_" not in name} == {
        f"{kind}/model.score.weight" for kind in ("weights", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("run", RUNS)
def test_steps_after_a_restart_have_the_metrics_of_the_uninterrupted_run(whole, resumed, run):
    for one, other in zip(whole, resumed):
        assert len(one[run]["metrics"]) == STEPS
        expected = one[run]["metrics"][SAVED_AFTER:]
        for got, metrics in zip(other[run]["metrics"], expected, strict=True):
            assert got == pytest.approx(metrics, rel=1e-6, abs=1e-9)
        assert one[run]["metrics"][0]["policy/grad_norm"] != pytest.approx(expected[0]["policy/grad_norm"], rel=1e-2)


def test_controller_and_scale_had_moved_when_they_were_saved(whole):
    saved = whole[0]["steered"]["saved"]["counters"]["trainer"]
    assert saved["kl"]["value"] != 0.1 and saved["score_scale"]["totals"][0] == SAVED_AFTER * 8
    assert whole[0]["rloo"]["saved"]["counters"]["trainer"]["score_scale"]["totals"][0] == 16  # the first batch's alone


@pytest.mark.parametrize("run", RUNS)
def test_a_restarted_run_ends_with_the_same_weights_and_average(whole, resumed, run):
    for one, other in zip(whole, resumed):
        assert_same_state(other[run]["end"], one[run]["end"])


@pytest.mark.parametrize("run", [run for run in RUNS if run.startswith("fp16")])
def test_the_loss_scale_had_moved_when_it_was_saved(whole, run):
    assert min(whole[0][run]["saved"]["counters"]["loss scales"]) > 2**8
