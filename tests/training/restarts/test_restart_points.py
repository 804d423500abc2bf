"""Restart points by name: which is found, which is set aside, which is refused."""

import json
from dataclasses import replace

import pytest

from engine.errors import UserError
from training.restarts.conditions import Conditions
from training.restarts.resume_point import STATE_FILE, ResumePoint, set_aside_newer

IDENTITY = {"seed": 1, "--dtype": "fp32"}


def write_point(output_dir, name, **state):
    folder = output_dir / "checkpoints" / name
    folder.mkdir(parents=True)
    state = {"steps_done": 5, "world_size": 1, "identity": IDENTITY, "ema": False} | state
    (folder / STATE_FILE).write_text(json.dumps(state))
    return folder


def find(path, **run) -> ResumePoint:
    return ResumePoint.find(str(path), **({"with_ema": False} | run))


def test_the_newest_complete_point_is_found(tmp_path):
    for name in ("step_000005", "step_000010", "step_000015.partial", "step_000020.abandoned"):
        write_point(tmp_path, name)
    assert find(tmp_path).folder.name == "step_000010"


def test_going_on_from_an_older_point_sets_the_newer_ones_aside(tmp_path):
    for step in (5, 10, 15):
        write_point(tmp_path, f"step_{step:06d}")
    set_aside_newer(tmp_path, 5)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step_000005", "step_000010.abandoned", "step_000015.abandoned"]
    assert find(tmp_path).folder.name == "step_000005"


def test_whether_the_run_stands_in_the_output_folder(tmp_path, monkeypatch):
    write_point(tmp_path, "step_000005")
    monkeypatch.chdir(tmp_path)
    assert (
        find(tmp_path, output_dir=".").in_output_dir
        and find("checkpoints/step_000005", output_dir="x/..").in_output_dir
    )
    assert not find(tmp_path, output_dir="elsewhere").in_output_dir and not find(tmp_path).in_output_dir


def test_other_settings_are_refused_by_name(tmp_path):
    point = find(write_point(tmp_path, "step_000005"))
    point.check(Conditions(IDENTITY), last_step=5)
    with pytest.raises(UserError, match="seed was 1 when it was written and is 2 now"):
        point.check(Conditions({**IDENTITY, "seed": 2}), last_step=5)
    with pytest.raises(UserError, match="stands at step 5, behind the run's last step 4. Raise --max_steps"):
        point.check(Conditions(IDENTITY), last_step=4)


@pytest.mark.parametrize(
    "state, run, message",
    [
        ({"world_size": 2}, {}, "written by 2 ranks, this run has 1"),
        ({"ema": True}, {}, "written with --enable_ema. Give the same flags"),
        ({}, {"with_ema": True}, "written without --enable_ema. Give the same flags"),
    ],
)
def test_files_that_do_not_fit_the_run_are_refused(tmp_path, state, run, message):
    with pytest.raises(UserError, match=message):
        find(write_point(tmp_path, "step_000005", **state), **run)


def test_a_node_that_does_not_see_the_point_is_named(tmp_path):
    point = replace(find(write_point(tmp_path, "step_000005")), folder=tmp_path / "gone")
    with pytest.raises(UserError, match="gone: not there on rank 0. Put the restart point where every node sees it"):
        point.check(Conditions(IDENTITY), last_step=5)
