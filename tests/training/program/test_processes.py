"""What is known of a process while it lives, is stopped, and is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from training.program.processes import start_of, state_of, this_machine


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


def test_a_machine_that_does_not_tell_its_boot(monkeypatch):
    other = subprocess.run(
        [sys.executable, "-c", "from training.program.processes import this_machine; print(this_machine())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == this_machine() != ""

    def unreadable(*_, **__):
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert this_machine() is None
