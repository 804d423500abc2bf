"""A run that goes on from a checkpoint, in new processes, is the run that was never interrupted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.models.lora import LoraSpec
from scripts.harness.programs import snapshot
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import (
    DIALECT,
    TinyPrompts,
    build_trainer,
    engine_spec,
    read_checkpoint,
    timeless,
    write_checkpoint,
)
from tests.engine.zero.inspecting import masters, pretend_cpus_have_fp16, weights
from training.checkpoints.files import ShardFiles
from training.ppo_trainer import PPOTrainer
from training.runtime import model_folders
from training.tools.export.model_folder import export

STEPS, SAVED_AFTER = 4, 2


def uninterrupted(folder: str, output: str, runs: dict[str, dict]) -> dict[str, dict]:
    """Each run to its end, with a checkpoint in `output`/name on the way."""
    found = {}
    for name, arguments in runs.items():
        trainer = new_trainer(folder, **arguments)
        metrics = []
        for report in trainer.fit(TinyPrompts(8)):
            metrics.append(timeless(report.metrics))
            if report.step == SAVED_AFTER:
                write_checkpoint(Path(output) / name, trainer.models, trainer.state_dict())
                save_models(trainer, Path(output) / name / "saved")
                saved = state(trainer)
        found[name] = {"metrics": metrics, "saved": saved, "end": state(trainer)}
    return found


def gone_on(folder: str, output: str, runs: dict[str, dict]) -> dict[str, dict]:
    """Each run from its checkpoint to its end, in new engines."""
    found = {}
    for name, arguments in runs.items():
        trainer = new_trainer(folder, **arguments)
        fresh = state(trainer)
        trainer.load_state_dict(read_checkpoint(Path(output) / name, trainer.models))
        loaded = state(trainer)
        metrics = [timeless(report.metrics) for report in trainer.fit(TinyPrompts(8))]
        found[name] = {"metrics": metrics, "fresh": fresh, "loaded": loaded, "end": state(trainer)}
    return found


def save_models(trainer: PPOTrainer, folder: Path) -> None:
    """What a run saves that ends here."""
    models = trainer.models
    for role, model in models.trained.items():
        model_folders.save_forms(model, models.tokenizer, folder, role)
    with models.ema.swapped():
        model_folders.save_forms(models.actor, models.tokenizer, folder, "actor_ema")


def new_trainer(
    folder: str, stage: int, config: str, dtype: str, changed: dict | None = None, lora: dict | None = None
) -> PPOTrainer:
    """Two epochs of two mini-batches a step, with an EMA; `changed`: fields of the dialect; `lora`: of the adapters of
    actor and critic, which play reference and reward model too."""
    pretend_cpus_have_fp16()
    dialect = DIALECT.override(**{"ppo_epochs": 2, "mini_batches": 2, **(changed or {})})
    spec = engine_spec(folder, stage, config=config, dtype=dtype, ema_decay=0.9)
    if not dialect.has_critic:
        spec = replace(spec, with_critic=False, critic_path=None, reward_paths=(spec.critic_path,))
    if lora is not None:
        adapters = LoraSpec(only=True, **lora)
        spec = replace(spec, actor_lora=adapters, critic_lora=adapters, reference=None, reward=None)
    return build_trainer(spec, dialect=dialect, total_steps=STEPS)


def state(trainer: PPOTrainer) -> dict:
    """The weights of actor and critic, the EMA, the loss scales and the counters."""
    engine = trainer.models
    tensors = {"ema": dict(enumerate(shard.clone() for shard in engine.ema.means))}
    for name, model in engine.trained.items():
        tensors |= {f"{name} weights": weights(model), f"{name} masters": masters(model)}
    counters = {
        "trainer": trainer.state_dict(),
        "loss scales": tuple(model.loss_scale for model in engine.trained.values()),
    }
    return {"tensors": tensors, "counters": counters}


RUNS = {
    f"{dtype}_{stage}{suffix}": {"stage": stage, "config": f"stage{stage}{suffix}.json", "dtype": dtype}
    for dtype, stage, suffix in (
        ("fp32", 0, ""),
        ("fp32", 3, "_persistent"),
        ("bf16", 3, ""),
        ("fp16", 2, "_growing"),
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
    return run_ranks("tests.distributed.test_restart:uninterrupted", folder=folder, output=output, runs=RUNS)


@pytest.fixture(scope="module")
def resumed(folder, output, whole) -> list[dict]:
    return run_ranks("tests.distributed.test_restart:gone_on", folder=folder, output=output, runs=RUNS)


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
def test_an_export_is_what_the_run_would_have_saved(whole, output, run, tmp_path):
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
