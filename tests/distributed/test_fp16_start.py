"""fp16 from a loss scale that is far too large, of one of two engines: both keep their weights, its scale is halved."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec, timeless
from tests.distributed.work_precision import everything
from tests.engine.zero.inspecting import pretend_cpus_have_fp16


def first_step(folder: str, output: str, stage: int, power: int) -> dict:
    """What everything is before and after a step of 2 epochs of 2 mini-batches, the actor's loss scale 2**power."""
    pretend_cpus_have_fp16()
    config = json.loads((Path(folder) / f"stage{stage}.json").read_text())
    config["fp16"]["initial_scale_power"] = power
    path = Path(output) / "large.json"
    path.write_text(json.dumps(config))
    spec = engine_spec(folder, stage, dtype="fp16", config=f"stage{stage}.json", ema_decay=0.9)
    spec = replace(spec, actor=replace(spec.actor, path=str(path)))  # another file than the critic's
    changed = {"ppo_epochs": 2, "mini_batches": 2, "kl_controller": "adaptive", "kl_coef": 0.1}
    trainer = build_trainer(spec, dialect=DIALECT.override(**changed, kl_target=6.0, kl_horizon=1000))
    before = everything(trainer)
    report = trainer.step(TinyPrompts(8).prompts(0))
    return {
        "before": before,
        "after": everything(trainer),
        "metrics": timeless(report.metrics),
        "state": trainer.state_dict(),
    }


POWER, UPDATES, RESPONSES = 40, 4, 8


def test_a_step_of_overflows_in_the_actor_alone(folder, output):
    found = run_ranks(
        "tests.distributed.test_fp16_start:first_step", folder=folder, output=output, stage=2, power=POWER
    )
    for rank in found:
        before, after, metrics = rank["before"], rank["after"], rank["metrics"]
        for model in ("actor", "critic"):
            for kind in ("weights", "masters"):
                for name, tensor in before[model][kind].items():
                    assert torch.equal(after[model][kind][name], tensor), f"{model}: {name}"
            assert after[model]["version"] == before[model]["version"]
        assert all(torch.equal(one, other) for one, other in zip(before["ema"], after["ema"], strict=True))
        # Four updates, each an overflow that halves the actor's scale; the critic's gradients are as they should be.
        assert before["actor"]["loss_scale"] == 2.0**POWER
        assert after["actor"]["loss_scale"] == 2.0 ** (POWER - UPDATES)
        assert after["critic"]["loss_scale"] == before["critic"]["loss_scale"] == 2.0**8
        assert metrics["policy/skipped"] == 1 and metrics["value/skipped"] == 0
        assert metrics["policy/loss_scale"] == 2.0 ** (POWER - 1) and metrics["value/loss_scale"] == 2.0**8
        assert not {"policy/grad_norm", "value/grad_norm"} & metrics.keys()
        # Every mini-batch is computed with the weights that drew it, and the actor is the reference: a KL of 0, so that
        # the coefficient falls by the most that it may, 0.2 for each 1000 responses.
        assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert metrics["objective/kl"] == 0
        assert rank["state"]["kl"]["value"] == pytest.approx(0.1 * (1 - 0.2 * RESPONSES / 1000), rel=1e-12)
        assert (rank["state"]["steps_done"], rank["state"]["optimizer_steps"]) == (1, UPDATES)
