"""Checkpoints by name and in time: when they are written, what becomes of a write that fails, which older ones are
deleted, which one is found, and which is set aside or refused.
"""

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from engine import distributed
from engine.errors import UserError
from tests.training.checkpoints.tiny_checkpoints import SETTINGS, TinyRun, flip_bit, write_checkpoints
from training.checkpoints import saving
from training.checkpoints import saving as module
from training.checkpoints.conditions import Conditions
from training.checkpoints.files import ShardFiles, checkpoint_folder, checkpoints_in, damages
from training.checkpoints.resuming import Checkpoint, _read, restore, set_aside_newer


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in (output_dir / "checkpoints").iterdir())


def test_a_point_holds_the_numbers_of_its_step(tmp_path):
    run = TinyRun(tmp_path, steps=2)
    run.train_to(5)
    assert names(tmp_path) == ["step_000002", "step_000004"]
    folder = tmp_path / "checkpoints" / "step_000004" / "actor"
    held = load_file(folder / "rank_00000.safetensors")  # by the library alone
    assert held.keys() == {"weights/matrix@4", "weights/matrix@0", "frozen/vector@0"}
    assert held["weights/matrix@0"].tolist() == [4.0] * 4 and held["frozen/vector@0"].dtype == torch.bfloat16
    files, out = ShardFiles(folder), torch.zeros(3)
    assert files.shapes() == {"weights/matrix": (2, 3), "frozen/vector": (4,)}
    files.read("weights/matrix", 3, out)
    assert out.tolist() == [4.0] * 3 and files.whole("weights/matrix").shape == (2, 3)
    assert damages(folder.parent) == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_goes_on_while_a_point_is_written_unless_that_is_not_wanted(tmp_path, monkeypatch, asynchronous):
    unwritten_noted = saving.threading.Event()
    write = saving.write_shards

    def write_later(path, shards):
        if asynchronous:
            unwritten_noted.wait(60)
        return write(path, shards)

    monkeypatch.setattr(saving, "write_shards", write_later)
    run = TinyRun(tmp_path, steps=1, asynchronous=asynchronous)
    run.step = 1
    run.checkpoints.save_if_due(1)
    assert names(tmp_path) == (["step_000001.partial"] if asynchronous else ["step_000001"])
    run.model.matrix.fill_(7.0)  # the next step
    unwritten_noted.set()
    run.checkpoints.wait()
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    assert ShardFiles(checkpoint / "actor").whole("weights/matrix").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    metrics = run.checkpoints.take_metrics()
    assert metrics.keys() == {"time/checkpoint", "checkpoint/seconds", "checkpoint/bytes"}
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert metrics["checkpoint/bytes"] == sum(path.stat().st_size for path in files)
    assert str(checkpoint) in run.said[0] and run.checkpoints.take_metrics() == {}


def test_minutes_are_counted_from_the_point_before(tmp_path, monkeypatch):
    run, clock = TinyRun(tmp_path, minutes=2.0), [0.0]
    monkeypatch.setattr(run.checkpoints, "_clock", lambda: clock[0])
    run.checkpoints._last_saved = 0.0
    for now in (60.0, 119.0, 121.0, 200.0, 241.0):
        clock[0] = now
        run.train_to(run.step + 1)
    assert names(tmp_path) == ["step_000003", "step_000005"]


def test_a_failed_write_leaves_the_run_going_and_is_tried_again(tmp_path, monkeypatch):
    run, clock = TinyRun(tmp_path, steps=2), [0.0]
    monkeypatch.setattr(run.checkpoints, "_clock", lambda: clock[0])
    run.train_to(2)
    write, full = saving.write_shards, [True]

    def write_or_fail(path, shards):
        write(path, shards)
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(saving, "write_shards", write_or_fail)
    run.train_to(4)
    assert names(tmp_path) == ["step_000002"]
    assert run.said[-1].startswith("CHECKPOINT NOT WRITTEN, of step 4: rank 0: [Errno 28] No space left on device")
    assert "step_000002 is untouched" in run.said[-1]
    monkeypatch.setattr(saving, "write_shards", write)
    run.train_to(5)
    assert names(tmp_path) == ["step_000002"]
    clock[0] = module.RETRY_AFTER + 1
    run.train_to(7)
    assert names(tmp_path) == ["step_000002", "step_000006"]  # due by its number and as another try: once


def test_a_folder_that_cannot_be_made_is_a_failed_write_too(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    run = TinyRun(tmp_path, steps=1)
    run.train_to(2)
    assert len(run.said) == 2 and all("CHECKPOINT NOT WRITTEN" in line for line in run.said)
    assert "there is none before it" in run.said[0] and (tmp_path / "checkpoints").read_text() == "a file"


@pytest.mark.parametrize("name", ["step_000001.partial", "step_000001"])
@pytest.mark.parametrize("target", ["other", "nowhere"])
def test_a_link_in_the_place_of_a_point_is_not_written_through(name, target, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "theirs").write_text("theirs")
    link = checkpoint_folder(tmp_path / "out", 1).with_name(name)
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / target)
    run = TinyRun(tmp_path / "out", steps=1)
    run.train_to(1)
    checkpoint = checkpoint_folder(tmp_path / "out", 1)
    assert damages(checkpoint) == [] and not checkpoint.is_symlink()
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["theirs"]
    assert not (tmp_path / "nowhere").exists()


def test_the_newest_and_the_best_are_kept(tmp_path):
    run = TinyRun(tmp_path, steps=2, keep=2, keep_best=True)
    run.train_to(9, scores={3: 0.5, 4: 0.1, 8: 0.2})
    assert names(tmp_path) == ["step_000003", "step_000006", "step_000008"]
    run.train_to(11, scores={11: 0.9})
    assert names(tmp_path) == ["step_000010", "step_000011"]


def test_scores_of_before_a_restart_count(tmp_path):
    points = write_checkpoints(tmp_path, 1, 2)
    run = TinyRun(tmp_path, resumed=points[1], scores={1: 0.5}, steps=1, keep=1, keep_best=True)
    run.step = 2
    run.train_to(4, scores={3: 0.4})
    assert names(tmp_path) == ["step_000001", "step_000004"]


def test_nothing_is_deleted_that_the_program_did_not_write(tmp_path):
    write_checkpoints(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step_000001" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "step_000000").mkdir()
    (tmp_path / "checkpoints" / "mine").mkdir()
    run = TinyRun(tmp_path, steps=1, keep=1)
    run.step = 2
    run.train_to(4)
    assert names(tmp_path) == ["mine", "step_000000", "step_000001", "step_000004"]


def test_a_point_is_written_once_and_another_course_is_set_aside(tmp_path):
    run = TinyRun(tmp_path)
    run.train_to(3)
    first = run.checkpoints.save(3, wait=True)
    assert run.checkpoints.save(3, wait=True) == first and len(run.said) == 1
    other = TinyRun(tmp_path)
    other.train_to(3)
    assert other.checkpoints.save(3, wait=True) == first
    assert names(tmp_path) == ["step_000003", "step_000003.abandoned"]


def find(path, output_dir="elsewhere", **run) -> Checkpoint:
    return Checkpoint.find(str(path), str(output_dir), **run)


def test_the_newest_point_is_found_by_its_number(tmp_path):
    write_checkpoints(tmp_path, 5, 999_998, 1_000_000)
    for name in ("step_2000000.partial", "step_2000001.abandoned", "step_2000002.pruned"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert find(tmp_path).folder.name == "step_1000000" and find(tmp_path).steps_done == 1_000_000


def test_auto_is_the_beginning_where_there_is_none(tmp_path):
    assert find("auto", tmp_path / "new") is None and find("auto", tmp_path) is None
    write_checkpoints(tmp_path, 5)
    checkpoint = find("auto", tmp_path)
    assert checkpoint.steps_done == 5 and checkpoint.in_output_dir
    assert Checkpoint.find(None, str(tmp_path)) is None


def test_going_on_from_an_older_point_sets_the_newer_ones_aside(tmp_path, monkeypatch):
    write_checkpoints(tmp_path, 5, 6, 10)
    with monkeypatch.context() as other:
        other.setattr(distributed, "is_main", lambda: False)
        set_aside_newer(tmp_path, 5)
    assert find(tmp_path).folder.name == "step_000010"  # the main rank does it
    set_aside_newer(tmp_path, 5)
    write_checkpoints(tmp_path, 10)
    for name in ("step_000007.partial", "step_000003.pruned"):  # of a killed run
        (tmp_path / "checkpoints" / name / "actor").mkdir(parents=True)
    set_aside_newer(tmp_path, 5)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step_000005", "step_000006.abandoned", "step_000010.abandoned", "step_000010.abandoned2"]
    assert find(tmp_path).folder.name == "step_000005"


def test_steps_before_the_first_are_below_0(tmp_path):
    """The critic's pretraining: steps -8 and -2, and 0 at its end."""
    run = TinyRun(tmp_path)
    for run.step in (-8, -2, 0, 4):
        run.checkpoints.save(run.step, wait=True)
    names = [path.name for path in checkpoints_in(tmp_path)]
    assert names == ["step_-00008", "step_-00002", "step_000000", "step_000004"]
    partial = tmp_path / "checkpoints" / "step_-00001.partial"
    partial.mkdir()
    assert find(tmp_path).steps_done == 4
    set_aside_newer(tmp_path, -2)
    assert not partial.exists() and [path.name for path in checkpoints_in(tmp_path)] == names[:2]
    assert find(tmp_path).steps_done == -2 and find("auto", tmp_path).folder.name == "step_-00002"


def test_whether_the_run_stands_in_the_output_folder(tmp_path, monkeypatch):
    write_checkpoints(tmp_path, 5)
    monkeypatch.chdir(tmp_path)
    assert find(tmp_path, ".").in_output_dir and find("checkpoints/step_000005", "x/..").in_output_dir
    assert not find(tmp_path).in_output_dir


def test_other_settings_are_refused_by_name(tmp_path):
    checkpoint = find(*write_checkpoints(tmp_path, 5))
    checkpoint.check(Conditions(SETTINGS), last_step=5)
    with pytest.raises(UserError, match="--seed was 1 when it was written and is 2 now"):
        checkpoint.check(Conditions({**SETTINGS, "--seed": 2}), last_step=5)
    with pytest.raises(UserError, match="stands at step 5, behind the run's last step 4. Raise --max_steps"):
        checkpoint.check(Conditions(SETTINGS), last_step=4)


def test_a_damaged_point_is_passed_over_for_the_one_before_it(tmp_path):
    older, newer = write_checkpoints(tmp_path, 5, 10)
    flip_bit(newer / "actor" / "rank_00000.safetensors")
    for path in (tmp_path, "auto"):
        checkpoint = find(path, tmp_path)
        assert checkpoint.folder == older and checkpoint.state["samples"] == 40
        assert checkpoint.lines() == [
            f"PASSED OVER: the checkpoint {newer} is damaged: actor/rank_00000.safetensors holds other bytes than "
            "were written",
            f"goes on from {older}, after step 5",
        ]


def test_a_damaged_point_that_is_named_is_refused(tmp_path):
    first, second, third = write_checkpoints(tmp_path, 5, 10, 15)
    (third / "trainer_state.json").unlink()
    (second / "manifest.json").write_text("{}")
    with pytest.raises(UserError) as refusal:
        find(third)
    assert str(refusal.value) == (
        f"--resume: the checkpoint {third} is damaged: trainer_state.json is missing. Give the run's output folder, "
        "whose newest whole one is then taken."
    )
    flip_bit(first / "config/actor/config.json")
    for path in (tmp_path, "auto"):
        with pytest.raises(UserError, match="step_000010 is damaged.*There is no other one: begin anew"):
            find(path, tmp_path)


def test_a_point_of_another_format_is_refused_by_it_and_passed_over_for_none(tmp_path, monkeypatch):
    write_checkpoints(tmp_path, 5, 10)
    monkeypatch.setattr("training.checkpoints.files.FORMAT", 2)
    for path in (tmp_path, tmp_path / "checkpoints" / "step_000010"):
        with pytest.raises(UserError, match="step_000010: the checkpoint is of format 1, and .* reads format 2"):
            find(path)


def test_an_average_is_not_lost_by_a_flag_that_was_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("training.checkpoints.saving.state_file", state_with_average)
    folder = write_checkpoints(tmp_path, 5)[0]
    with pytest.raises(UserError, match="it has a moving average, which would be lost. Give --enable_ema"):
        find(folder)
    assert find(folder, with_ema=True).steps_done == 5


def state_with_average(state, scalars, conditions, with_ema) -> str:
    return json.dumps({**state, "models": scalars, "settings": {}, "contents": {}, "ema": True})


def test_nothing_there_is_said_with_what_to_do(tmp_path):
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UserError, match="no checkpoint there.*--save_steps"):
            find(path)


def test_an_average_that_the_checkpoint_lacks_begins_with_its_weights():
    checkpoint = Checkpoint(Path("step_000003"), {"ema": False, "models": {}})
    ema = SimpleNamespace(means=[torch.zeros(2)], actor=SimpleNamespace(master_shards=lambda: [torch.ones(2)]))
    assert restore(checkpoint, {}) == []
    assert "begins with the weights" in restore(checkpoint, {}, ema)[0] and ema.means[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    "change, told",
    [
        ({"kl": {"value": "0.1"}}, "state.kl.value is '0.1'"),
        ({"score_scale": {"totals": [1.0, 2.0]}}, "state.score_scale.totals has 2 items, not 3"),
        ({"models": {"actor": {"adam_steps": [3], "loss_scale": {}}}}, "state.models.actor.adam_steps is .3."),
        ({"contents": {"--reward_function": 3}}, "state.contents.--reward_function is"),
        ({"reward": {"standardised": [{"totals": [1.0]}]}}, "state.reward.standardised.*totals has 1 items, not 3"),
    ],
)
def test_a_state_of_wrong_types_is_told(tmp_path, change, told):
    """A digest proves nothing about who wrote it: a stranger can sign any state."""
    state = {"steps_done": 1, "models": {}, "ema": False, "settings": {"kl_controller": "adaptive"}, "contents": {}}
    state |= {"optimizer_steps": 1, "samples": 8, "prompt_batches": 1, "kl": {"value": 1}}
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({**state, "score_scale": {"totals": [0, 0, 0]}} | change))
    with pytest.raises(UserError, match=told):
        _read(path, with_ema=False)
