"""A run's folder: one writer at a time; a kill at any instant of saving leaves the earlier model or the new one whole;
folders in which a run had only begun; and a stranger's lists and links, which reach nothing outside of it.
"""

import itertools
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest

from engine.errors import RunStopped, UserError
from training.checkpoints.files import point_folder
from training.runtime import model_folders, output_folder, stopping
from training.runtime.output_folder import COMPLETE, LOCK_FILE, POINTS, STALE, Written, finish_interrupted
from training.runtime.processes import start_of


@pytest.fixture(autouse=True)
def given_back():
    yield
    output_folder.release_lock()


def hold(folder: Path, begin, said, end) -> None:
    """Run by a process of its own: take the folder when all do, say what came of it, and live to the end."""
    begin.wait()
    try:
        output_folder.take_lock(folder)
        said.send("taken")
    except UserError as error:
        said.send(str(error))
    end.wait()


def write_lock(folder: Path, **changes) -> Path:
    """A lock as this process would write it, with these changes."""
    path = folder / LOCK_FILE
    path.write_text(json.dumps({"token": "another", **output_folder.this_process(), **changes}))
    return path


def aged(path: Path, seconds: float) -> Path:
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_of_many_at_once_one_takes_it_and_it_goes_with_a_killed_process(tmp_path):
    """The lock that all of them find is a dead process's: they race for its removal as well."""
    folder = tmp_path / "out"
    folder.mkdir()
    write_lock(folder, pid=2**22 + 1)
    forked = multiprocessing.get_context("fork")
    begin, end = forked.Barrier(4), forked.Event()
    ends = [forked.Pipe(duplex=False) for _ in range(4)]
    processes = [forked.Process(target=hold, args=(folder, begin, said, end)) for _, said in ends]
    try:
        for process in processes:
            process.start()
        said = [heard.recv() for heard, _ in ends]
        assert sorted(words == "taken" for words in said) == [False, False, False, True]
        holder = processes[said.index("taken")]
        for words in said:
            assert words == "taken" or f"process {holder.pid} on this machine since" in words
        with pytest.raises(
            UserError, match=f"--output_dir {folder}: another run writes there, process {holder.pid} on"
        ):
            output_folder.take_lock(folder)
        holder.kill()
        holder.join()
        output_folder.take_lock(folder)
        assert output_folder.read_lock(folder / LOCK_FILE)["pid"] == os.getpid()
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [path.name for path in folder.iterdir()] == [LOCK_FILE]


def test_a_number_that_another_process_has_by_now_is_no_holder(tmp_path):
    write_lock(tmp_path, pid=os.getppid(), process_started="1")
    output_folder.take_lock(tmp_path)


def test_a_living_process_is_one_however_old_its_lock(tmp_path):
    parent = os.getppid()
    aged(write_lock(tmp_path, pid=parent, process_started=start_of(parent)), 10 * STALE)
    with pytest.raises(UserError, match=f"process {parent} on this machine"):
        output_folder.take_lock(tmp_path)


def test_of_a_long_command_the_beginning_is_shown(tmp_path):
    parent = os.getppid()
    command = "training/step3_rlhf.py" + " --flag value" * 50
    write_lock(tmp_path, pid=parent, process_started=start_of(parent), command=command)
    with pytest.raises(UserError, match=r"\(training/step3_rlhf.py .{60,80} \.\.\.\)\. Wait for its end"):
        output_folder.take_lock(tmp_path)


@pytest.mark.parametrize("machine", ["another boot pid:[1]", None])
def test_a_process_of_another_machine_lives_while_it_refreshes_the_file(tmp_path, machine):
    path = aged(write_lock(tmp_path, machine=machine, host="node7", pid=1), STALE - 60)
    with pytest.raises(UserError, match="process 1 on node7 since"):
        output_folder.take_lock(tmp_path)
    aged(path, STALE + 60)
    output_folder.take_lock(tmp_path)


def test_a_file_that_says_nothing(tmp_path):
    (tmp_path / LOCK_FILE).touch()  # being written at this instant, as far as anyone knows
    with pytest.raises(UserError, match="another run writes there, which one its run.lock does not say"):
        output_folder.take_lock(tmp_path)
    aged(tmp_path / LOCK_FILE, STALE + 60)
    output_folder.take_lock(tmp_path)


def test_a_link_to_nowhere_is_cleared_as_a_file_of_its_age(tmp_path):
    lock = tmp_path / LOCK_FILE
    lock.symlink_to(tmp_path / "nowhere")
    old = time.time() - 400
    os.utime(lock, (old, old), follow_symlinks=False)
    output_folder.take_lock(tmp_path)
    assert not lock.is_symlink() and not (tmp_path / "nowhere").exists()
    output_folder.release_lock()


def test_giving_back_leaves_no_trace_but_what_was_written(tmp_path):
    output_folder.take_lock(tmp_path / "new" / "out")
    output_folder.release_lock()
    assert list(tmp_path.iterdir()) == []
    output_folder.take_lock(tmp_path / "new" / "out")
    (tmp_path / "new" / "out" / "metrics.jsonl").touch()
    output_folder.release_lock()
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == ["metrics.jsonl"]


def test_a_run_whose_folder_was_taken_over_stops_and_leaves_the_others_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(output_folder, "REFRESHED", 0.01)
    output_folder.take_lock(tmp_path)
    output_folder.check_held()
    write_lock(tmp_path, host="node7", machine="another", pid=1)
    wait(lambda: output_folder._held.taken_by is not None)
    with pytest.raises(RunStopped, match="process 1 on node7 since .* has taken this folder over"):
        output_folder.check_held()
    output_folder.release_lock()
    assert output_folder.read_lock(tmp_path / LOCK_FILE)["host"] == "node7"


def test_a_folder_that_is_moved_is_made_again_and_held(tmp_path, monkeypatch):
    monkeypatch.setattr(output_folder, "REFRESHED", 0.01)
    output_folder.take_lock(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    wait(lambda: (tmp_path / "out" / LOCK_FILE).exists())
    output_folder.check_held()
    with pytest.raises(UserError, match="another run writes there"):
        output_folder.OutputLock(tmp_path / "out")


def wait(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_there_for_the_time_being_goes_with_the_lock(tmp_path):
    output_folder.take_lock(tmp_path / "out")
    passing = tmp_path / "out" / "exported"
    (passing / "1").mkdir(parents=True)
    output_folder.remove_with(passing)
    output_folder.release_lock()
    assert not (tmp_path / "out").exists(), "which was made for the lock, and is empty again"


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
    monkeypatch.setattr("engine.whole_files._exchanged", killing(EXCHANGED[0]))


EXCHANGED = [None]


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "renamed"])
@pytest.mark.parametrize("name", ["actor", "."])
def test_every_instant(name, at_once, tmp_path):
    from engine import whole_files

    EXCHANGED[0] = whole_files._exchanged if at_once else lambda one, other: False
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
    assert Written.read(out).models == {name: sorted(NEW)}


@pytest.mark.parametrize("name", ["actor", "."])
def test_a_users_file_of_a_models_name_is_kept_beside_it(name, tmp_path):
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "config.json").write_text("the user's")
    model_folders._replace(writer(NEW), tmp_path, name)
    assert model_in(tmp_path / name) == NEW
    assert (tmp_path / name / "config.json.kept").read_text() == "the user's"


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


def listed(folder, *files: str, **models: list[str]) -> None:
    """Put a list into the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "written.json").write_text(json.dumps({"files": files, "models": models}))


@pytest.fixture
def folder(tmp_path):
    """OUT/inner -> OTHER, with a file in each that is somebody's."""
    folder, other = tmp_path / "out", tmp_path / "other"
    for path in (folder / "samples", other / "step_000001"):
        path.mkdir(parents=True)
        (path / "manifest.json").write_text('{"files": {}}')
    (folder / "inner").symlink_to(other)
    (folder / "checkpoints").symlink_to(other)
    return folder


def test_nothing_is_removed_that_a_list_names_elsewhere(tmp_path):
    folder, theirs = tmp_path / "out", tmp_path / "theirs"
    theirs.write_text("theirs")
    names = [str(theirs), "../theirs", "../*", "samples/../../theirs"]
    listed(folder, *names, **{".": names, "..": ["theirs"], str(tmp_path): ["theirs"]})
    output_folder.remove_earlier(folder)
    output_folder.remove_other_models(folder, kept=[])
    assert theirs.is_file() and Written.read(folder) == Written(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"files": 1, "models": {}}', '{"files": [], "models": {"": 5}}'])
def test_a_list_that_is_none_names_nothing(text, tmp_path):
    (tmp_path / "written.json").write_text(text)
    assert Written.read(tmp_path) == Written(tmp_path)


def test_nothing_is_removed_through_a_link(folder):
    listed(
        folder, "inner/step_000001/*", "inner/*", "samples/*", "", "**x", POINTS, inner=["step_000001/manifest.json"]
    )
    output_folder.remove_earlier(folder)
    output_folder.remove_other_models(folder, kept=[])
    assert not (folder / "samples").exists()
    assert (folder / "inner" / "step_000001" / "manifest.json").is_file()


def test_nothing_is_removed_that_a_manifest_names_elsewhere(folder):
    (folder / "checkpoints").unlink()
    point, theirs = point_folder(folder, 1), folder / "inner" / "step_000001" / "manifest.json"
    (point / "actor").mkdir(parents=True)
    (point / "actor" / "rank_00000.safetensors").write_text("ours")
    (point / "critic").symlink_to(theirs.parent)
    names = (
        str(theirs),
        "../../inner/step_000001/manifest.json",
        "critic/manifest.json",
        "actor/rank_00000.safetensors",
    )
    (point / "manifest.json").write_text(json.dumps({"files": dict.fromkeys(names)}))
    listed(folder, POINTS)
    output_folder.remove_earlier(folder)
    assert theirs.is_file()
    assert [path.name for path in point.iterdir()] == ["critic"]
