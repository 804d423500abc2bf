"""What a process says: it goes on where that cannot be written, and torchrun's report has our message; what is known of
a process while it lives, is stopped, and is gone.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from engine.errors import SharedError
from scripts.harness import ROOT
from training.runtime import watch
from training.runtime.environment import ERROR_FILE, print_error, print_line, write_error_file
from training.runtime.heartbeats import Reporter, Verdict
from training.runtime.processes import is_another_rank, state_of, this_machine

PRINTS = """
import sys
from training.runtime.environment import flush_all, keep_printing
keep_printing()
for number in range(1000):
    print("x" * 100, flush=number % 2 == 0)
    print("y" * 100, file=sys.stderr)
open(sys.argv[1], "w").write("went on")
flush_all(0)
sys.exit(0)
"""


def end_of(tmp_path, **streams) -> int:
    command = [sys.executable, "-c", PRINTS, str(tmp_path / "result")]
    return subprocess.run(command, cwd=ROOT, timeout=120, check=False, **streams).returncode


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("place", ["a full disk", "a pipe that nobody reads"])
def test_what_cannot_be_printed_is_lost(tmp_path, name, place):
    other = {"stdout": "stderr", "stderr": "stdout"}[name]
    if place == "a full disk":
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    try:
        assert end_of(tmp_path, **{name: writing, other: subprocess.DEVNULL}) == 0
    finally:
        os.close(writing)
    assert (tmp_path / "result").read_text() == "went on"


def test_streams_that_were_closed_before(tmp_path):
    script = f'exec "{sys.executable}" -c "$0" "$1" >&- 2>&-'
    command = ["sh", "-c", script, PRINTS, str(tmp_path / "result")]
    assert subprocess.run(command, cwd=ROOT, timeout=120, check=False).returncode == 0
    assert (tmp_path / "result").read_text() == "went on"


def test_what_a_terminal_would_obey_is_shown(capfd):
    print_line("one\x1b]0;title\x07\n\ttwo é")
    assert capfd.readouterr().err == "one\\x1b]0;title\\x07\n\ttwo é\n"


def report_of(file) -> str:
    """As torchrun prints it for rank 0, which left this file and ended with exit code 2."""
    failure = ProcessFailure(local_rank=0, pid=4, exitcode=2, error_file=str(file))
    return str(ChildFailedError("step3_rlhf.py", {0: failure}))


def test_the_report_ends_with_our_message(monkeypatch, tmp_path, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(file))
    assert "To enable traceback" in report_of(file)
    assert print_error(SharedError("--max_steps -3: must be at least 1.")) == 2
    assert capsys.readouterr().err == "error: --max_steps -3: must be at least 1.\n"
    assert "  traceback : error: --max_steps -3: must be at least 1.\n" in report_of(file)
    assert "To enable traceback" not in report_of(file)


def test_the_report_has_the_reason_of_all_and_not_what_came_of_it_here(monkeypatch, tmp_path):
    file, ended = tmp_path / "error.json", []
    monkeypatch.setenv(ERROR_FILE, str(file))
    monkeypatch.setattr(watch, "leave_now", ended.append)
    write_error_file("Traceback: connection closed by peer")
    watch.conclude(Verdict("error: on gpu2: there is no folder X.", code=2), SimpleNamespace(rank=0))
    assert ended == [2] and "  traceback : error: on gpu2: there is no folder X.\n" in report_of(file)
    reporter = Reporter.__new__(Reporter)  # of a rank that has lost rank 0
    reporter.rank = 1
    reporter._conclude("rank 0 is cut off: the run ends.")
    assert "  traceback : rank 0 is cut off: the run ends.\n" in report_of(file)


def test_without_torchrun_and_where_nothing_can_be_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ERROR_FILE, raising=False)
    write_error_file("a")
    monkeypatch.setenv(ERROR_FILE, "")  # as where it keeps no logs
    write_error_file("a")
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "absent" / "error.json"))
    write_error_file("a")
    assert list(tmp_path.iterdir()) == []


def waited_for(condition) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_process_until_it_is_gone():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        process.send_signal(signal.SIGSTOP)
        assert waited_for(lambda: state_of(process.pid) == "T")
        process.kill()
        assert waited_for(lambda: state_of(process.pid) == "Z")
    finally:
        process.kill()
        process.wait()
    assert state_of(process.pid) is None


def test_another_rank_is_a_process_with_the_same_words():
    words = """import os, time; from training.runtime.processes import is_another_rank
print(is_another_rank(int(os.environ["OTHER"]))) if "OTHER" in os.environ else time.sleep(600)"""
    one = subprocess.Popen([sys.executable, "-c", words, "--local_rank=0"])
    try:
        assert not any(map(is_another_rank, (one.pid, os.getpid(), -1, 0, 1, 2**31)))
        for others, found in ((["--local_rank=1"], "True"), (["--local_rank=1", "--seed"], "False")):
            command, environment = [sys.executable, "-c", words, *others], os.environ | {"OTHER": str(one.pid)}
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            assert ended.stdout.strip() == found
    finally:
        one.kill()
        one.wait()


def test_a_machine_that_does_not_tell_its_boot(monkeypatch):
    other = subprocess.run(
        [sys.executable, "-c", "from training.runtime.processes import this_machine; print(this_machine())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == this_machine() != ""

    def unreadable(*_, **__):
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert this_machine() is None
