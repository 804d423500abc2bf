"""One writer a folder: who is refused, whose lock is stale, and what a run does that has lost its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.errors import RunStopped, UserError
from training.runtime import output_folder
from training.runtime.output_folder import LOCK_FILE, STALE
from training.runtime.processes import start_of

HOLD = """
import sys
from pathlib import Path
from training.runtime.output_folder import take_lock
from engine.errors import UserError
print("ready", flush=True)
sys.stdin.readline()
try:
    take_lock(Path(sys.argv[1]))
    print("taken", flush=True)
except UserError as error:
    print(error, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def given_back():
    yield
    output_folder.release_lock()


def start(folder: Path) -> subprocess.Popen:
    """A process that takes the folder at the first line on its stdin, says what came of it, and lives to the second."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def write(folder: Path, **changes) -> Path:
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
    write(folder, pid=2**22 + 1)
    processes = [start(folder) for _ in range(4)]
    try:
        for process in processes:
            go(process)
        said = [process.stdout.readline() for process in processes]
        assert sorted(line == "taken\n" for line in said) == [False, False, False, True]
        holder = processes[said.index("taken\n")]
        for line in said:
            assert line == "taken\n" or f"process {holder.pid} on this machine since" in line
        with pytest.raises(
            UserError, match=f"--output_dir {folder}: another run writes there, process {holder.pid} on"
        ):
            output_folder.take_lock(folder)
        holder.kill()
        holder.wait()
        output_folder.take_lock(folder)
        assert output_folder.read_lock(folder / LOCK_FILE)["pid"] == os.getpid()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [path.name for path in folder.iterdir()] == [LOCK_FILE]


def test_a_number_that_another_process_has_by_now_is_no_holder(tmp_path):
    write(tmp_path, pid=os.getppid(), process_started="1")
    output_folder.take_lock(tmp_path)


def test_a_living_process_is_one_however_old_its_lock(tmp_path):
    parent = os.getppid()
    aged(write(tmp_path, pid=parent, process_started=start_of(parent)), 10 * STALE)
    with pytest.raises(UserError, match=f"process {parent} on this machine"):
        output_folder.take_lock(tmp_path)


def test_of_a_long_command_the_beginning_is_shown(tmp_path):
    parent = os.getppid()
    command = "training/step3_rlhf.py" + " --flag value" * 50
    write(tmp_path, pid=parent, process_started=start_of(parent), command=command)
    with pytest.raises(UserError, match=r"\(training/step3_rlhf.py .{60,80} \.\.\.\)\. Wait for its end"):
        output_folder.take_lock(tmp_path)


@pytest.mark.parametrize("machine", ["another boot pid:[1]", None])
def test_a_process_of_another_machine_lives_while_it_refreshes_the_file(tmp_path, machine):
    path = aged(write(tmp_path, machine=machine, host="node7", pid=1), STALE - 60)
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
    write(tmp_path, host="node7", machine="another", pid=1)
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
