"""Run by ranks: a step in which the actor's loss scale is far too large, and the critic's is not."""

import json
from dataclasses import replace
from pathlib import Path

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
