"""Restart points by name: which is found, which is set aside, which is refused."""

import json
from dataclasses import replace

import pytest

from engine.errors import UserError
from tests.training.checkpoints.tiny_points import IDENTITY, TinyRun, flip_bit, write_points
from training.checkpoints.conditions import Conditions
from training.checkpoints.files import points_in
from training.checkpoints.resuming import ResumePoint, set_aside_newer
from training.runtime.output_folder import is_point


def find(path, output_dir="elsewhere", **run) -> ResumePoint:
    return ResumePoint.find(str(path), str(output_dir), **run)


def test_the_newest_point_is_found_by_its_number(tmp_path):
    write_points(tmp_path, 5, 999_998, 1_000_000)
    for name in ("step_2000000.partial", "step_2000001.abandoned", "step_2000002.pruned"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert find(tmp_path).folder.name == "step_1000000" and find(tmp_path).steps_done == 1_000_000


def test_auto_is_the_beginning_where_there_is_none(tmp_path):
    assert find("auto", tmp_path / "new") is None and find("auto", tmp_path) is None
    write_points(tmp_path, 5)
    point = find("auto", tmp_path)
    assert point.steps_done == 5 and point.in_output_dir
    assert ResumePoint.find(None, str(tmp_path)) is None


def test_going_on_from_an_older_point_sets_the_newer_ones_aside(tmp_path):
    write_points(tmp_path, 5, 10, 15)
    set_aside_newer(tmp_path, 5)
    write_points(tmp_path, 10)
    for name in ("step_000007.partial", "step_000003.pruned"):  # of a killed run
        (tmp_path / "checkpoints" / name / "actor").mkdir(parents=True)
    set_aside_newer(tmp_path, 5)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step_000005", "step_000010.abandoned", "step_000010.abandoned2", "step_000015.abandoned"]
    assert find(tmp_path).folder.name == "step_000005"


def test_steps_before_the_first_are_below_0(tmp_path):
    """The critic's pretraining: steps -8 and -2, and 0 at its end."""
    run = TinyRun(tmp_path)
    for run.step in (-8, -2, 0, 4):
        run.checkpoints.save(run.step, wait=True)
    names = [path.name for path in points_in(tmp_path)]
    assert names == ["step_-00008", "step_-00002", "step_000000", "step_000004"]
    assert all(is_point(path) for path in points_in(tmp_path))
    partial = tmp_path / "checkpoints" / "step_-00001.partial"
    partial.mkdir()
    assert is_point(partial) and find(tmp_path).steps_done == 4
    set_aside_newer(tmp_path, -2)
    assert not partial.exists() and [path.name for path in points_in(tmp_path)] == names[:2]
    assert find(tmp_path).steps_done == -2 and find("auto", tmp_path).folder.name == "step_-00002"


def test_whether_the_run_stands_in_the_output_folder(tmp_path, monkeypatch):
    write_points(tmp_path, 5)
    monkeypatch.chdir(tmp_path)
    assert find(tmp_path, ".").in_output_dir and find("checkpoints/step_000005", "x/..").in_output_dir
    assert not find(tmp_path).in_output_dir


def test_other_settings_are_refused_by_name(tmp_path):
    point = find(*write_points(tmp_path, 5))
    point.check(Conditions(IDENTITY), last_step=5)
    with pytest.raises(UserError, match="seed was 1 when it was written and is 2 now"):
        point.check(Conditions({**IDENTITY, "seed": 2}), last_step=5)
    with pytest.raises(UserError, match="stands at step 5, behind the run's last step 4. Raise --max_steps"):
        point.check(Conditions(IDENTITY), last_step=4)


def test_a_damaged_point_is_passed_over_for_the_one_before_it(tmp_path):
    older, newer = write_points(tmp_path, 5, 10)
    flip_bit(newer / "actor" / "rank_00000.safetensors")
    for path in (tmp_path, "auto"):
        point = find(path, tmp_path)
        assert point.folder == older and point.state["samples"] == 40
        assert point.lines() == [
            f"PASSED OVER: the restart point {newer} is damaged: actor/rank_00000.safetensors holds other bytes than "
            "were written",
            f"goes on from {older}, after step 5",
        ]


def test_a_damaged_point_that_is_named_is_refused_with_the_older_whole_one(tmp_path):
    first, second, third = write_points(tmp_path, 5, 10, 15)
    (third / "trainer_state.json").unlink()
    (second / "manifest.json").write_text("{}")
    with pytest.raises(UserError) as refusal:
        find(third)
    assert str(refusal.value) == (
        f"--resume: the restart point {third} is damaged: trainer_state.json is missing. Give the older one, {first}."
    )
    flip_bit(first / "config/actor/config.json")
    with pytest.raises(UserError, match="There is no older whole one beside it"):
        find(third)
    for path in (tmp_path, "auto"):
        with pytest.raises(UserError, match="step_000010 is damaged.*There is no other one: begin anew"):
            find(path, tmp_path)


def test_a_point_of_another_format_is_refused_by_it_and_passed_over_for_none(tmp_path, monkeypatch):
    write_points(tmp_path, 5, 10)
    monkeypatch.setattr("training.checkpoints.files.FORMAT", 2)
    for path in (tmp_path, tmp_path / "checkpoints" / "step_000010"):
        with pytest.raises(UserError, match="step_000010: the restart point is of format 1, and .* reads format 2"):
            find(path)


def test_an_average_is_not_lost_by_a_flag_that_was_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("training.checkpoints.saving.state_file", state_with_average)
    folder = write_points(tmp_path, 5)[0]
    with pytest.raises(UserError, match="it has a moving average, which would be lost. Give --enable_ema"):
        find(folder)
    assert find(folder, with_ema=True).steps_done == 5


def state_with_average(state, scalars, conditions, with_ema) -> str:
    return json.dumps({**state, "models": scalars, "identity": {}, "settings": {}, "ema": True})


def test_nothing_there_is_said_with_what_to_do(tmp_path):
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UserError, match="no restart point there.*--save_steps"):
            find(path)


def test_the_point_is_a_value_that_can_be_handed_to_other_ranks(tmp_path):
    point = find(*write_points(tmp_path, 5))
    assert replace(point, passed_over=("a",)).lines()[0] == "PASSED OVER: a"
