"""A run's folder: one writer at a time; a kill at any instant of saving leaves the earlier model or the new one whole;
and folders in which a run may begin.
"""

import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from engine.errors import RunStopped, UserError
from tests.training.config.command_lines import step3
from training.checkpoints.files import checkpoint_folder
from training.runtime import model_folders, output_folder, stopping
from training.runtime.output_folder import COMPLETE, LOCK_FILE, finish_interrupted


@pytest.fixture(autouse=True)
def given_back():
    yield
    output_folder.release_lock()


def hold(folder: Path, begin, said) -> None:
    """Run by a process of its own: take the folder when all do, say what came of it, and live on, as does a process
    that it forks."""
    begin.wait()
    try:
        output_folder.take_lock(folder)
        if (child := os.fork()) == 0:
            time.sleep(600)
        said.send(child)
    except UserError as error:
        said.send(str(error))
    time.sleep(600)


def test_of_many_at_once_one_takes_it_and_holds_it_stopped_too_until_it_is_killed(tmp_path):
    """Of the forked processes none holds it. The first file is one that a killed run has left."""
    folder, child = tmp_path / "out", None
    folder.mkdir()
    (folder / LOCK_FILE).write_text("process 1 on elsewhere")
    forked = multiprocessing.get_context("fork")
    begin = forked.Barrier(4)
    ends = [forked.Pipe(duplex=False) for _ in range(4)]
    processes = [forked.Process(target=hold, args=(folder, begin, said)) for _, said in ends]
    try:
        for process in processes:
            process.start()
        said = [heard.recv() for heard, _ in ends]
        ((place, child),) = [(place, word) for place, word in enumerate(said) if isinstance(word, int)]
        holder = processes[place]
        os.kill(holder.pid, signal.SIGSTOP)
        message = (
            f"--output_dir {folder}: another run writes there, process {holder.pid} on {socket.gethostname()} since"
        )
        with pytest.raises(UserError, match=message):
            output_folder.take_lock(folder)
        holder.kill()
        holder.join()
        os.kill(child, 0)  # it lives
        output_folder.take_lock(folder)
        assert (folder / LOCK_FILE).stat().st_size > 0
    finally:
        for process in processes:
            process.kill()
            process.join()
        if child is not None:
            os.kill(child, signal.SIGKILL)
    assert [path.name for path in folder.iterdir()] == [LOCK_FILE]


def test_a_file_that_the_holder_removes_meanwhile_is_not_the_lock(tmp_path, monkeypatch):
    lockf = fcntl.lockf

    def late(descriptor, how):
        monkeypatch.setattr(fcntl, "lockf", lockf)
        (tmp_path / LOCK_FILE).unlink()
        lockf(descriptor, how)

    monkeypatch.setattr(fcntl, "lockf", late)
    output_folder.take_lock(tmp_path)
    assert (tmp_path / LOCK_FILE).stat().st_ino == os.fstat(output_folder._held._descriptor).st_ino


def test_without_locks_the_run_goes_on_and_says_so(tmp_path, monkeypatch, capsys):
    def none(*given):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)
    output_folder.take_lock(tmp_path)
    assert f"WARNING: the file system of {tmp_path} has no locks (No locks available)" in capsys.readouterr().out


def test_a_link_in_the_place_of_the_lock_is_not_written_through(tmp_path):
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"nothing can be written there \(Too many levels of symbolic links\)"):
        output_folder.take_lock(tmp_path)
    assert not (tmp_path / "theirs").exists()


def test_giving_back_leaves_no_trace_but_what_was_written(tmp_path):
    output_folder.take_lock(tmp_path / "new" / "out")
    passing = tmp_path / "new" / "out" / "exported"
    (passing / "1").mkdir(parents=True)
    output_folder.remove_with(passing)
    output_folder.release_lock()
    assert list(tmp_path.iterdir()) == []
    output_folder.take_lock(tmp_path / "new" / "out")
    (tmp_path / "new" / "out" / "metrics.jsonl").touch()
    output_folder.release_lock()
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == ["metrics.jsonl"]


OLD = {"config.json": "old", "model-00001-of-00002.safetensors": "old", "model-00002-of-00002.safetensors": "old"}
NEW = {"config.json": "new", "model.safetensors": "new"}
OPERATIONS = ((Path, "replace"), (Path, "rename"), (Path, "unlink"), (os, "link"), (shutil, "rmtree"), (os, "unlink"))


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the program catches it."""


def writer(files: dict[str, str]):
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
    monkeypatch.setattr("engine.atomic_files._exchanged", killing(EXCHANGED[0]))


EXCHANGED = [None]


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "renamed"])
@pytest.mark.parametrize("name", ["actor", "."])
def test_every_instant(name, at_once, tmp_path):
    from engine import atomic_files

    EXCHANGED[0] = atomic_files._exchanged if at_once else lambda one, other: False
    for number in range(100):
        out = tmp_path / str(number)
        model_folders._replace(writer(OLD), out, name)
        (out / name / "notes.txt").write_text("the user's")
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(number, monkeypatch)
            try:
                model_folders._replace(writer(NEW), out, name)
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
        model_folders._replace(writer(NEW), out, name)  # the next run's
        assert model_in(out / name) == NEW
    assert done and number > 3
    assert model_in(out / name) == NEW
    assert (out / name / "notes.txt").read_text() == "the user's"


@pytest.mark.parametrize("name", ["actor.partial", "actor.old", "model.partial", "model.complete"])
def test_what_is_half_written_is_no_link(name, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    writer(OLD)(other)
    (out / name).symlink_to(other)
    model = "actor" if name.startswith("actor") else "."
    if not name.endswith(".partial"):  # which the save itself finds, too
        finish_interrupted(out)
    model_folders._replace(writer(NEW), out, model)
    assert model_in(out / model) == NEW and model_in(other) == OLD
    assert not (out / name).is_symlink()


def test_a_link_is_no_file_of_a_whole_model(tmp_path):
    complete, other = tmp_path / COMPLETE, tmp_path / "theirs"
    writer(NEW)(complete)
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
    place = model_folders._save_somewhere(writer(NEW), tmp_path, "actor", 2_500_000)
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


def begun(folder: Path) -> Path:
    """The folder of a run that died within its first save."""
    for name in ("metrics.jsonl", "samples/before.jsonl", "run.lock", "training.log", "notes/mine.txt"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("")
    (folder / "run.json").write_text(json.dumps({"starts": [{"models": None}]}))
    partial = checkpoint_folder(folder, 1).with_name("step_000001.partial")
    (partial / "actor").mkdir(parents=True)
    (partial / "actor" / "rank_00000.safetensors").write_bytes(b"half")
    (partial / "manifest.json").write_text("{}")
    return folder


def check(folder: Path, resume: str | None = "auto", **flags) -> None:
    output_folder.check_output_dirs(step3(output_dir=str(folder), resume=resume, **flags))


def test_a_run_that_came_to_nothing_begins_again_on_request(tmp_path):
    for name in ("new", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        check(tmp_path / name, resume=None)
    check(begun(tmp_path / "begun"))
    (tmp_path / "begun" / "trackers.json").write_text('{"wandb": "a"}')
    args = step3(output_dir=str(tmp_path / "begun"), resume="auto")
    output_folder.begin_output_dir(args)
    assert not (tmp_path / "begun" / "metrics.jsonl").exists(), "its lines would be followed by the same steps'"
    assert not (tmp_path / "begun" / "trackers.json").exists(), "the new run would continue its runs"
    assert (tmp_path / "begun" / "notes" / "mine.txt").exists()
    with pytest.raises(UserError, match=r"begun is not empty. Choose another folder\.$"):
        check(tmp_path / "begun", resume=None)


def test_results_and_anything_else_are_no_beginning(tmp_path):
    (begun(tmp_path / "done") / "run.json").write_text('{"starts": [{"models": {"step": 2, "actor": "x"}}, {}]}')
    checkpoint_folder(begun(tmp_path / "checkpoint"), 1).mkdir()
    (begun(tmp_path / "other") / "run.json").unlink()
    for name in ("done", "checkpoint", "other"):
        with pytest.raises(UserError, match="is not empty"):
            check(tmp_path / name)


def test_curves_of_another_run_are_not_mixed_with(tmp_path):
    (tmp_path / "curves" / f"{tmp_path.name}_out").mkdir(parents=True)
    (tmp_path / "curves" / f"{tmp_path.name}_out" / "events").touch()
    with pytest.raises(UserError, match="--tensorboard_path .*_out is not empty"):
        check(tmp_path / "out", tensorboard_path=str(tmp_path / "curves"))


def test_models_of_an_earlier_form_are_set_aside(tmp_path):
    """A stranger's record names nothing outside."""
    names = ("actor", "critic", "adapter", "mine")
    for name in names:
        writer(OLD)(tmp_path / "out" / name)
    writer(OLD)(tmp_path / "theirs")
    saved = dict.fromkeys(("actor", "critic", ".", "mine", "../theirs"), "x")
    record = {"starts": [{"models": {"step": 2, **saved}}, {"models": None}]}
    (tmp_path / "out" / "run.json").write_text(json.dumps(record))
    (tmp_path / "out" / "config.json").write_text("old")
    model_folders.finish(tmp_path / "out", {"actor": tmp_path / "out" / "actor"}, 3)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"actor", "critic.abandoned", "adapter", "mine", "config.json.abandoned", "run.json"}
    assert model_in(tmp_path / "theirs") == OLD
