"""Output folders: what cannot be written, what another run holds, and what a run has left."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from scripts.harness.programs import assert_one_message, metric_lines, run_here, snapshot
from training.runtime import output_folder


def test_a_folder_that_cannot_be_written(tiny, capfd):
    result = run_here(1, tiny.flags(1, output_dir="/proc/new/out"), capfd)  # not even by root
    assert_one_message(result, ["--output_dir /proc/new/out", "nothing can be written into /proc"])


@pytest.mark.parametrize("step", (1, 2, 3))
def test_another_run_is_left_alone_and_one_that_only_began_begins_again(step, tiny, tmp_path, capfd):
    out = tmp_path / "out"
    flags = tiny.flags(step, output_dir=out)
    assert run_here(step, flags, capfd).code == 0
    before, steps = snapshot(out), [line["step"] for line in metric_lines(out)]
    for changes in ({"seed": 7}, {"resume": "auto"}):
        assert_one_message(run_here(step, {**flags, **changes}, capfd), [f"{out} is not empty. Choose another folder."])
        assert snapshot(out) == before
    record = json.loads((out / "run.json").read_text())
    record["starts"][-1]["models"] = None  # as if the run had been killed while it saved its models
    (out / "run.json").write_text(json.dumps(record))
    (out / "mine.txt").touch()
    # A mistake that is found only when the data are tokenised changes nothing.
    size = "per_device_generation_batch_size" if step == 3 else "per_device_train_batch_size"
    before = snapshot(out)
    assert run_here(step, {**flags, "resume": "auto", size: 36}, capfd).code == 2
    assert snapshot(out) == before
    assert run_here(step, {**flags, "resume": "auto"}, capfd).code == 0
    assert [line["step"] for line in metric_lines(out)] == steps and (out / "mine.txt").is_file()
    assert len(json.loads((out / "run.json").read_text())["starts"]) == 1


def hold(folder: Path, said) -> None:
    output_folder.take_lock(folder)
    said.send("held")
    time.sleep(600)


@pytest.mark.parametrize("step", (1, 2, 3))
def test_a_folder_that_another_run_writes_into(step, tiny, tmp_path, capfd):
    forked = multiprocessing.get_context("fork")
    heard, said = forked.Pipe(duplex=False)
    holder = forked.Process(target=hold, args=(tmp_path, said))
    holder.start()
    try:
        assert heard.recv() == "held"
        os.kill(holder.pid, signal.SIGSTOP)
        flags, before = tiny.flags(step, output_dir=tmp_path), snapshot(tmp_path)
        expected = [f"--output_dir {tmp_path}: another run writes there, process {holder.pid} on"]
        assert_one_message(run_here(step, flags, capfd), expected)
        assert run_here(step, {**flags, "dry_run": True}, capfd).code == 0
        assert snapshot(tmp_path) == before
    finally:
        holder.kill()
        holder.join()
    assert run_here(step, flags, capfd).code == 0


def test_resuming_into_the_folder_of_a_third_run(tiny, bad, tmp_path, capfd):
    first = tiny.flags(3, output_dir=tmp_path / "one", save_steps=1)
    assert run_here(3, first, capfd).code == 0
    point = tmp_path / "one" / "checkpoints" / "step_000001"
    before = snapshot(bad)
    result = run_here(3, {**first, "output_dir": bad, "resume": point}, capfd)
    assert_one_message(result, [f"--output_dir {bad} is not empty. Choose another folder"])
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


def test_links_and_what_the_run_reads_are_not_written_through(tiny, tmp_path, capfd):
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    other.mkdir()
    for name in ("actor", "critic", "checkpoints"):
        (out / name).symlink_to(other)
        (out / "run.json").write_text('{"starts": []}')
        flags = tiny.flags(3, output_dir=out, resume="auto")
        assert_one_message(run_here(3, flags, capfd), [f"--output_dir {out}: {name} in it is a link to {other}"])
        (out / name).unlink()
    (out / "run.json").unlink()
    assert list(out.iterdir()) == list(other.iterdir()) == []
    linked = tmp_path / "linked"
    linked.symlink_to(out)
    assert run_here(1, tiny.flags(1, output_dir=linked), capfd).code == 0
    assert linked.is_symlink() and (out / "model.safetensors").is_file()
    before = snapshot(tiny.folder)
    for place, how in ((tiny.folder / "sft", "is"), (tiny.folder / "sft/new", "lies in"), (tiny.folder, "contains")):
        flags = tiny.flags(1, output_dir=place)
        expected = f"--output_dir {place}: it {how} --model_name_or_path {tiny.folder}/sft, which the run reads"
        if how != "contains":
            assert_one_message(run_here(1, flags, capfd), [expected])
        else:
            assert_one_message(run_here(1, flags, capfd), [f"--output_dir {place}: it contains --"])
    assert snapshot(tiny.folder) == before


@pytest.mark.parametrize(
    "name, make, kind",
    [
        ("metrics.jsonl", Path.mkdir, "file"),
        ("actor", Path.touch, "folder"),
        ("checkpoints", Path.touch, "folder"),
        ("tensorboard", os.mkfifo, "folder"),
    ],
)
def test_something_of_another_kind_stands_in_the_place(tiny, tmp_path, capfd, name, make, kind):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"starts": []}')
    make(tmp_path / "out" / name)
    result = run_here(3, tiny.flags(3, output_dir=tmp_path / "out", resume="auto"), capfd)
    assert_one_message(result, [f"{name} in it is no {kind}, and the run writes one there. Move it away."])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {name, "run.json"}


JUDGE = """
from pathlib import Path
calls = 0

def score(prompts, responses):
    global calls
    calls += 1
    if calls == 4:  # of the last step: two calls were for the held-out prompts, and one for the first step
        Path({out!r}).rename({moved!r})
    return [0.5 + 0.1 * calls] * len(responses)
"""


def test_a_folder_that_is_moved_while_the_run_goes(tiny, tmp_path, capfd):
    out, moved = tmp_path / "out", tmp_path / "moved"
    (tmp_path / "moving.py").write_text(JUDGE.format(out=str(out), moved=str(moved)))
    flags = tiny.flags(3, output_dir=out, reward_function=f"{tmp_path / 'moving.py'}:score", enable_tensorboard=False)
    result = run_here(3, flags, capfd)
    assert result.code == 0, result.stderr
    assert [line["step"] for line in metric_lines(out)] == [2]
    assert [line["step"] for line in metric_lines(moved)] == [0, 1]
    for name in ("actor/config.json", "critic/config.json", "samples/after.jsonl", "run.json"):
        assert (out / name).is_file(), name
