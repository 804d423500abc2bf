"""What is kept whole over the micro-batches of steps 1 and 2 saves calls, and changes no weight but by rounding."""

from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

from engine.zero.long_batch import LongBatch
from scripts.harness.programs import Tiny, metric_lines
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
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


ROUNDING = 1e-6  # of sums that are taken in another order


@pytest.fixture(scope="module")
def calls(tmp_path_factory, folder, output) -> list[dict]:
    tiny = Tiny(tmp_path_factory.mktemp("tiny"))
    return run_ranks("tests.distributed.test_supervised_long_batch:all_ways", folder=output, models=folder, tiny=tiny)


@pytest.mark.parametrize("step", CASES)
def test_weights_are_gathered_once_and_gradients_reduced_once_a_step(calls, step):
    """By hand, as in test_long_batch.py: 5 units of one model, each gathered once or in each pass to and fro."""
    passes = STEPS * PASSES
    expected = {
        "nothing": {"passes": passes, "gathers": 2 * 5 * passes, "reductions": passes},
        "weights": {"passes": passes, "gathers": 5 * STEPS, "reductions": passes},
        "both": {"passes": passes, "gathers": 5 * STEPS, "reductions": STEPS},
    }
    for rank in calls:
        assert {way: rank[f"{step}_{way}"] for way in CASES[step]} == {way: expected[way] for way in CASES[step]}


def test_weights_are_those_of_each_pass_by_itself_where_they_alone_are_kept(calls, output):
    plainly, weights = (Path(output) / f"1_{way}" / "model.safetensors" for way in ("nothing", "weights"))
    assert weights.read_bytes() == plainly.read_bytes()


@pytest.mark.parametrize("step", CASES)
def test_weights_after_two_steps_are_the_same_within_rounding(calls, output, step):
    plainly, both = (Path(output) / f"{step}_{way}" for way in ("nothing", "both"))
    expected, found = (load_file(folder / "model.safetensors") for folder in (plainly, both))
    assert plain.relative_error(found, expected) <= ROUNDING
    for line, other in zip(metric_lines(both), metric_lines(plainly), strict=True):
        for name in line:
            if name.startswith(("train/", "eval/")):
                assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
