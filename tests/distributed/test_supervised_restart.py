"""Steps 1 and 2, killed and gone on with: bit by bit the run that was never interrupted."""

from pathlib import Path

import pytest

from scripts.harness.programs import Tiny, lasting_metrics, metric_lines, run_here
from tests.distributed.harness import run_ranks
from tests.distributed.work_supervised_restart import flags_of

STAGES = (0, 3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runs(tiny, output):
    """The folder of all runs, and which of them ended."""
    ended = run_ranks("tests.distributed.work_supervised_restart:all_runs", folder=output, tiny=tiny, stages=STAGES)
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
    """From the point of step 3 of two ranks at stage 0, by one at stage 3: losses differ by rounding alone."""
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
        ({"per_device_train_batch_size": 2}, "examples a step was 8 when it was written and is 4 now"),
        ({"per_device_train_batch_size": 4, "seed": 5}, "seed was 1234"),
        ({"per_device_train_batch_size": 4, "held_out": 9}, "the data, those held out included, are others"),
    ):
        result = run_here(1, flags | changes, capfd)
        assert result.code == 2 and message in result.stderr, result.stderr
