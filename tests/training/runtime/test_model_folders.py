"""A kill at any instant of saving leaves the earlier model or the new one whole, and the next run puts all in order."""

import itertools
import os
import shutil
from pathlib import Path

import pytest

from engine.errors import RunStopped
from training.runtime import model_folders, stopping
from training.runtime.output_folder import COMPLETE, Written, finish_interrupted

OLD = {"config.json": "old", "model-00001-of-00002.safetensors": "old", "model-00002-of-00002.safetensors": "old"}
NEW = {"config.json": "new", "model.safetensors": "new"}
OPERATIONS = ((Path, "replace"), (Path, "rename"), (Path, "unlink"), (os, "link"), (shutil, "rmtree"), (os, "unlink"))


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the program catches it."""


def write(files: dict[str, str]):
    def into(folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)

    return into


def model_in(folder: Path) -> dict[str, str]:
    """The model's files in a folder; what else is there is no part of it."""
    if not folder.is_dir():
        return {}
    return {path.name: path.read_text() for path in folder.iterdir() if path.name in {**OLD, **NEW}}


def kill_at(number: int, monkeypatch) -> None:
    """Have the file operation of this number, and all after it, not happen."""
    counter = itertools.count()

    def killing(operation):
        def wrapped(*args, **kwargs):
            if next(counter) >= number:
                raise Killed
            return operation(*args, **kwargs)

        return wrapped

    for owner, name in OPERATIONS:
        monkeypatch.setattr(owner, name, killing(getattr(owner, name)))
    monkeypatch.setattr("engine.whole_files._exchanged", killing(EXCHANGED[0]))


EXCHANGED = [None]


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "renamed"])
@pytest.mark.parametrize("name", ["actor", "."])
def test_every_instant(name, at_once, tmp_path):
    from engine import whole_files

    EXCHANGED[0] = whole_files._exchanged if at_once else lambda one, other: False
    for number in range(100):
        out = tmp_path / str(number)
        model_folders._replace(write(OLD), out, name)
        (out / name / "notes.txt").write_text("the user's")
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(number, monkeypatch)
            try:
                model_folders._replace(write(NEW), out, name)
                done = True
            except Killed:
                done = False
        places = [out / name, out / "actor.old", out / "actor.partial", out / COMPLETE]
        whole = [model_in(place) for place in places if model_in(place) in (OLD, NEW)]
        assert whole, f"killed at {number}: {sorted(map(str, out.rglob('*')))}"
        if name == "." and "config.json" in model_in(out):
            assert model_in(out) in (OLD, NEW), f"killed at {number}: a mixture can be loaded"
        finish_interrupted(out)
        assert model_in(out / name) in (OLD, NEW), f"killed at {number}"
        assert [path.name for path in out.iterdir() if path.suffix in (".partial", ".old", ".complete")] == []
        if done:
            break
        model_folders._replace(write(NEW), out, name)  # the next run's
        assert model_in(out / name) == NEW
    assert done and number > 3
    assert model_in(out / name) == NEW
    assert (out / name / "notes.txt").read_text() == "the user's"
    assert Written.read(out).models == {name: sorted(NEW)}


@pytest.mark.parametrize("name", ["actor", "."])
def test_a_users_file_of_a_models_name_is_kept_beside_it(name, tmp_path):
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "config.json").write_text("the user's")
    model_folders._replace(write(NEW), tmp_path, name)
    assert model_in(tmp_path / name) == NEW
    assert (tmp_path / name / "config.json.kept").read_text() == "the user's"


@pytest.mark.parametrize("name", ["actor.partial", "actor.old", "model.partial", "model.complete"])
def test_what_is_half_written_is_no_link(name, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    write(OLD)(other)
    (out / name).symlink_to(other)
    model = "actor" if name.startswith("actor") else "."
    if not name.endswith(".partial"):  # which the save itself finds, too
        finish_interrupted(out)
    model_folders._replace(write(NEW), out, model)
    assert model_in(out / model) == NEW and model_in(other) == OLD
    assert not (out / name).is_symlink()


def test_a_link_is_no_file_of_a_whole_model(tmp_path):
    complete, other = tmp_path / COMPLETE, tmp_path / "theirs"
    write(NEW)(complete)
    other.write_text("theirs")
    (complete / "metrics.jsonl").symlink_to(other)
    finish_interrupted(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*sorted(NEW), "theirs"]


def test_a_model_whose_place_cannot_be_written_goes_elsewhere_and_is_told(tmp_path, monkeypatch, capsys):
    """A file in the way of the partial folder stands for a full disk."""
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "config.json").write_text("old")
    (tmp_path / "actor.partial").write_text("in the way")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    place = model_folders._save_somewhere(write(NEW), tmp_path, "actor", 2_500_000)
    assert place.is_relative_to(tmp_path / "tmp") and model_in(place) == NEW
    assert (tmp_path / "actor" / "config.json").read_text() == "old"
    said = capsys.readouterr().err
    assert f"WARNING: {tmp_path}/actor (2.5 MB) cannot be written (File exists)" in said and str(place) in said
    with pytest.raises(RunStopped, match=r"not all of it is on the disk: .*actor \(2.5 MB\)"):
        stopping.check_all_written()
    stopping.forget_unwritten()


def test_with_no_place_at_all_it_is_tried_again_and_then_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(model_folders, "INTERVAL", 0.0)
    monkeypatch.setattr(model_folders, "PATIENCE", 0.05)
    tries = []

    def full(folder: Path) -> None:
        tries.append(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        model_folders._save_somewhere(full, tmp_path, "actor", 1)
    assert tries.count(tmp_path / "actor.partial") > 1
    stopping.forget_unwritten()
