"""A folder in which a run died before its first restart point, which --resume auto may begin again in."""

import pytest

from training.checkpoints.files import point_folder
from training.runtime import output_folder


def begun(folder) -> None:
    """What a run has written that died within its first save."""
    output_folder.announce(folder, "metrics.jsonl", "samples/before.jsonl", output_folder.POINTS)
    for name in ("metrics.jsonl", "samples/before.jsonl", "run.lock", "training.log"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    partial = point_folder(folder, 1).with_name("step_000001.partial")
    (partial / "actor").mkdir(parents=True)
    (partial / "actor" / "rank_00000.safetensors").write_bytes(b"half")


def test_a_folder_of_a_run_that_came_to_nothing(tmp_path):
    assert output_folder.only_begun(tmp_path)
    begun(tmp_path)
    assert output_folder.only_begun(tmp_path)


def test_a_first_point_that_only_lacks_its_name_is_none_yet(tmp_path):
    begun(tmp_path)
    (tmp_path / "checkpoints" / "step_000001.partial" / "manifest.json").write_text("{}")
    assert output_folder.only_begun(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "samples/mine.jsonl", "actor/config.json", "checkpoints/step_000001/x"])
def test_anything_else_is_somebodys(tmp_path, name):
    begun(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / name).write_text("")
    assert not output_folder.only_begun(tmp_path)


def test_a_restart_point_is_no_beginning(tmp_path):
    begun(tmp_path)
    point = point_folder(tmp_path, 1)
    point.mkdir(parents=True)
    (point / "manifest.json").write_text("{}")
    assert not output_folder.only_begun(tmp_path)
