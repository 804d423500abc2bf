"""What is known of a process while it lives, is stopped, and is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from training.runtime.processes import is_another_rank, start_of, state_of, this_machine


def waited_for(condition) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_process_until_it_is_gone():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        began = start_of(process.pid)
        ticks = os.sysconf("SC_CLK_TCK")
        up = float(Path("/proc/uptime").read_text().split()[0])
        assert up - 60 < int(began) / ticks <= up
        assert start_of(os.getpid()) is not None and int(start_of(os.getpid())) <= int(began)
        process.send_signal(signal.SIGSTOP)
        assert waited_for(lambda: state_of(process.pid) == "T") and start_of(process.pid) == began
        process.kill()
        assert waited_for(lambda: state_of(process.pid) == "Z") and start_of(process.pid) is None
    finally:
        process.kill()
        process.wait()
    assert state_of(process.pid) is None and start_of(process.pid) is None


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
