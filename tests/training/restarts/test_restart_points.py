"""Restart points by name: which is found, which is set aside, which is refused."""

import json

import pytest

from engine.errors import UserError
from training.restarts import checkpoint

IDENTITY = {"seed": 1, "--dtype": "fp32"}


def write_point(output_dir, name):
    folder = output_dir / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / checkpoint.STATE_FILE).write_text(json.dumps({"world_size": 1, "identity": IDENTITY, "ema": False}))
    return folder


def test_the_newest_complete_point_is_found(tmp_path):
    for name in ("step_000005", "step_000010", "step_000015.partial", "step_000020.abandoned"):
        write_point(tmp_path, name)
    assert checkpoint.find(str(tmp_path))[0].name == "step_000010"


def test_going_on_from_an_older_point_sets_the_newer_ones_aside(tmp_path):
    for step in (5, 10, 15):
        write_point(tmp_path, f"step_{step:06d}")
    checkpoint.set_aside_newer(tmp_path, 5)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step_000005", "step_000010.abandoned", "step_000015.abandoned"]
    assert checkpoint.find(str(tmp_path))[0].name == "step_000005"


def test_other_settings_are_refused_by_name(tmp_path):
    point, state = checkpoint.find(str(write_point(tmp_path, "step_000005")))
    checkpoint.check_identity(point, state, IDENTITY)
    with pytest.raises(UserError, match="seed was 1 when it was written and is 2 now"):
        checkpoint.check_identity(point, state, {**IDENTITY, "seed": 2})
