"""Run by ranks: two steps of steps 1 and 2, three micro-batches each, with more and less kept whole over them."""

from pathlib import Path
from unittest import mock

from engine.zero.long_batch import LongBatch
from scripts.harness.programs import Tiny
from tests.distributed.work_supervised_restart import run
from tests.engine.zero.work_long_batch import WAYS, counted

PASSES, STEPS = 3, 2
CASES = {1: ("nothing", "weights", "both"), 2: ("nothing", "both")}  # of WAYS


def all_ways(folder: str, models: str, tiny: Tiny) -> dict[str, dict]:
    """By STEP_WAY what `counted` counts; the runs write into `folder`/STEP_WAY. models: the folder of `actor`."""
    found = {}
    for step, names in CASES.items():
        flags = tiny.flags(
            step,
            model_name_or_path=Path(models) / "actor",
            ds_config=Path(models) / "stage3.json",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=PASSES,
            max_steps=STEPS,
            learning_rate=3e-3,
            enable_tensorboard="false",
            **({"normalization_samples": 0} if step == 2 else {}),
        )
        for name in names:
            with mock.patch.object(LongBatch, "_decided", lambda batch, name=name: WAYS[name]), counted() as calls:
                assert run(step, flags, Path(folder) / f"{step}_{name}")
            found[f"{step}_{name}"] = dict(calls)
    return found
