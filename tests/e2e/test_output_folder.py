"""Output folders: what cannot be written, and what an earlier run left is overwritten on request alone."""

import json
import os

import pytest

from tests.e2e.programs import assert_one_message, metric_lines, run_here, snapshot
from training.program import output_lock


def test_a_folder_that_cannot_be_written(tiny, capfd):
    result = run_here(1, tiny.flags(1, output_dir="/proc/new/out"), capfd)  # not even by root
    assert_one_message(result, ["--output_dir /proc/new/out", "nothing can be written into /proc"])


@pytest.mark.parametrize("step", (1, 2, 3))
def test_another_run_is_overwritten_on_request_only(step, tiny, tmp_path, capfd):
    out = tmp_path / "out"
    assert run_here(step, tiny.flags(step, output_dir=out), capfd).code == 0
    stale = [out / "checkpoints" / "step_000009" / "trainer_state.json", out / "samples" / "stale.jsonl"]
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"world_size": 1, "ema": false, "identity": {}}')
    before, steps = snapshot(out), [line["step"] for line in metric_lines(out)]

    assert_one_message(run_here(step, tiny.flags(step, output_dir=out, seed=7), capfd), [f"{out} is not empty"])
    assert snapshot(out) == before
    # A mistake that is found only when the data are tokenised leaves the old run alone, too.
    size = "per_device_generation_batch_size" if step == 3 else "per_device_train_batch_size"
    assert run_here(step, tiny.flags(step, output_dir=out, overwrite_output_dir=True, **{size: 36}), capfd).code == 2
    assert snapshot(out) == before

    assert run_here(step, tiny.flags(step, output_dir=out, seed=7, overwrite_output_dir=True), capfd).code == 0
    assert [line["step"] for line in metric_lines(out)] == steps
    assert not any(path.exists() for path in stale), "what the earlier run left stands among the new run's files"
    assert len(list((out / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize("step", (1, 2, 3))
def test_a_folder_that_another_run_writes_into(step, tiny, tmp_path, capfd):
    parent = os.getppid()
    record = {**output_lock.this_process(), "pid": parent, "process_started": output_lock._start_time(parent)}
    (tmp_path / output_lock.LOCK_FILE).write_text(json.dumps(record))
    (tmp_path / "metrics.jsonl").write_text("")
    flags, before = tiny.flags(step, output_dir=tmp_path, overwrite_output_dir=True), snapshot(tmp_path)
    expected = [f"--output_dir {tmp_path}: another run writes there, process {parent} on this machine"]
    assert_one_message(run_here(step, flags, capfd), expected)
    assert snapshot(tmp_path) == before
    assert run_here(step, {**flags, "dry_run": True}, capfd).code == 0
    assert snapshot(tmp_path) == before


def test_resuming_into_the_folder_of_a_third_run(tiny, bad, tmp_path, capfd):
    point = tmp_path / "one" / "checkpoints" / "step_000001"
    point.mkdir(parents=True)
    (point / "trainer_state.json").write_text('{"world_size": 1, "ema": false, "identity": {}}')
    flags = tiny.flags(3, output_dir=bad, resume=tmp_path / "one")
    before = snapshot(bad)
    assert_one_message(run_here(3, flags, capfd), [f"--output_dir {bad} is not empty", "--overwrite_output_dir"])
    assert snapshot(bad) == before


def test_steps_before_the_restart_point_are_not_recorded(tiny, tmp_path, capfd):
    flags = tiny.flags(3, output_dir=tmp_path / "out", save_steps=1)
    assert run_here(3, flags, capfd).code == 0
    before = snapshot(tmp_path / "out")
    point = tmp_path / "out" / "checkpoints" / "step_000001"
    assert_one_message(
        run_here(3, {**flags, "resume": point, "profile_steps": [1, 2]}, capfd),
        ["--profile_steps 1: this run trains steps 2 to 2"],
    )
    assert snapshot(tmp_path / "out") == before
