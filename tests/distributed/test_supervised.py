"""Steps 1 and 2 on two ranks: restarts, and batches of many micro-batches."""

import contextlib
import shutil
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

from engine import distributed
from engine.zero.gather_once import TrainingGather
from scripts.harness.programs import PROGRAMS, Tiny, command_line, lasting_metrics, metric_lines, run_here
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.engine.zero.work_gather_once import WAYS, counted
from training.checkpoints.saving import CheckpointWriter
from training.config.parsing import parse_flags
from training.runtime import output_folder
from training.supervised import SupervisedTrainer

SAVE_STEPS, BROKEN_AT = 3, 6  # the points of steps 3 and 6; the step after 5 does not come to its end
NORMALIZATION = "training.step2_reward.score_statistics"


class Killed(BaseException):
    """Ends a run where it stands: nothing in it expects this."""


def all_runs(folder: str, tiny: Tiny, stages: tuple[int, ...]) -> dict[str, list[bool]]:
    """By STEP_STAGE, which of two courses ended; they write into `folder`/STEP_STAGE_whole and STEP_STAGE_resumed."""
    ended = {}
    for step in (1, 2):
        for stage in stages:
            whole, resumed = (Path(folder) / f"{step}_{stage}_{name}" for name in ("whole", "resumed"))
            flags = flags_of(tiny, step, stage)
            ended[f"{step}_{stage}"] = [run(step, flags, whole)]
            with broken_at(BROKEN_AT):
                run(step, flags, resumed)
            if stage == 0:
                keep(resumed, Path(folder) / f"{step}_half")
            if step == 2:
                with mock.patch(NORMALIZATION, side_effect=Killed):
                    run(step, flags, resumed)
            ended[f"{step}_{stage}"].append(run(step, flags, resumed))
    return ended


def flags_of(tiny: Tiny, step: int, stage: int) -> dict:
    """32 examples in micro-batches of 2 by 2 ranks, 2 a step: 4 steps an epoch, two epochs; stage 3 with dropout."""
    return tiny.flags(
        step,
        zero_stage=stage,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=3e-3,
        dropout=0.1 if stage == 3 else 0.0,
        save_steps=SAVE_STEPS,
        resume="auto",
        eval_interval=3,
        **({"normalize_before": True} if step == 2 else {}),
    )


def run(step: int, flags: dict, output_dir: Path) -> bool:
    """Run the program of this step in these processes; whether it came to its end, or was killed."""
    module, flags_class = PROGRAMS[step]
    args = parse_flags(flags_class, command_line({**flags, "output_dir": output_dir, "dtype": "fp32"}), "", print)
    ended = False
    with contextlib.suppress(Killed):
        module.main(args)
        ended = True
    output_folder.release_lock()
    distributed.barrier()
    return ended


def broken_at(step: int):
    """Within this context a run ends in the middle of this step, after its backward passes."""
    whole, save = SupervisedTrainer.optimizer_step, CheckpointWriter.save

    def optimizer_step(self, number, batches):
        if number == step:
            self.loss(batches[0], mock.Mock())
            raise Killed
        return whole(self, number, batches)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(SupervisedTrainer, "optimizer_step", optimizer_step))
    # The checkpoint of step 3 is whole, however slow the disk.
    stack.enter_context(
        mock.patch.object(CheckpointWriter, "save", lambda self, step, wait=False: save(self, step, True))
    )
    return stack


def keep(folder: Path, copy: Path) -> None:
    """Rank 0 copies a stopped run's folder, to be gone on with by others."""
    if distributed.is_main():
        shutil.copytree(folder, copy)
    distributed.barrier()


STAGES = (0, 3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runs(tiny, output):
    """The folder of all runs, and which of them ended."""
    ended = run_ranks("tests.distributed.test_supervised:all_runs", folder=output, tiny=tiny, stages=STAGES)
    return ended[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("step", (1, 2))
def test_weights_and_metrics_are_those_of_the_uninterrupted_run(runs, output, step, stage):
    assert runs[f"{step}_{stage}"] == [True, True]
    whole, resumed = (Path(output) / f"{step}_{stage}_{name}" for name in ("whole", "resumed"))
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (resumed / "config.json").read_text() == (whole / "config.json").read_text()  # step 2's score_offset, too
    assert [line["step"] for line in metric_lines(resumed)] == list(range(9))
    assert lasting_metrics(resumed) == lasting_metrics(whole)


@pytest.mark.parametrize("step", (1, 2))
def test_another_number_of_ranks_and_another_stage_see_the_same_examples(runs, tiny, output, step, capfd):
    """From the checkpoint of step 3 of two ranks at stage 0, by one at stage 3: losses differ by rounding alone."""
    half = Path(output) / f"{step}_half"
    flags = flags_of(tiny, step, 0) | {"per_device_train_batch_size": 4, "zero_stage": 3, "output_dir": half}
    result = run_here(step, flags, capfd)
    assert result.code == 0, result.stderr
    assert "changed since the checkpoint: ranks 2 -> 1" in result.stdout
    assert "changed since the checkpoint: --zero_stage 0 -> 3" in result.stdout
    expected = lasting_metrics(Path(output) / f"{step}_0_whole")
    got = lasting_metrics(half)
    assert got[:4] == expected[:4]
    for line, other in zip(got[4:], expected[4:], strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_other_data_and_another_number_of_examples_a_step_are_refused(runs, tiny, output, capfd):
    half = Path(output) / "1_0_resumed"
    flags = flags_of(tiny, 1, 0) | {"output_dir": half}
    for changes, message in (
        ({"per_device_train_batch_size": 2}, "rows a step was 8 when it was written and is 4 now"),
        ({"per_device_train_batch_size": 4, "seed": 5}, "seed was 1234"),
        ({"per_device_train_batch_size": 4, "held_out": 9}, "--held_out was 8.0 when it was written and is 9.0 now"),
    ):
        result = run_here(1, flags | changes, capfd)
        assert result.code == 2 and message in result.stderr, result.stderr


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
            with mock.patch.object(TrainingGather, "_decided", lambda batch, name=name: WAYS[name]), counted() as calls:
                assert run(step, flags, Path(folder) / f"{step}_{name}")
            found[f"{step}_{name}"] = dict(calls)
    return found


ROUNDING = 1e-6  # of sums that are taken in another order


@pytest.fixture(scope="module")
def calls(tmp_path_factory, folder, output) -> list[dict]:
    tiny = Tiny(tmp_path_factory.mktemp("tiny"))
    return run_ranks("tests.distributed.test_supervised:all_ways", folder=output, models=folder, tiny=tiny)


@pytest.mark.parametrize("step", CASES)
def test_weights_are_gathered_once_and_gradients_reduced_once_a_step(calls, step):
    """By hand, as in test_gather_once.py: 5 units of one model, each gathered once or in each pass to and fro."""
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
