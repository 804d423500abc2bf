"""Programs as processes of their own: how they ended, and what they took."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.comparison.tasks import ROOT

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that each process does without: two with one port could not run side by side."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Its exit code, the CPU seconds of it and of what it started, and the seconds of the clock."""

    code: int
    cpu_seconds: float
    seconds: float


_running: set[subprocess.Popen] = set()


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """At TERM, programs that run are killed: a later comparison would meet them in its folders."""

    def end(number: int, _: object) -> None:
        for process in list(_running):
            process.kill()
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_program(command: Sequence[str], log: Path) -> Ended:
    """Run a command in the repository, where it finds the project's packages; what it prints goes into `log`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    began = time.perf_counter()
    with log.open("w") as printed:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        _running.add(process)
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            _running.discard(process)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(process.returncode, used.ru_utime + used.ru_stime, time.perf_counter() - began)


def reason(log: Path) -> str:
    """Why a program broke off: the line that says so, or else the last one."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("stopped: ")), lines[-1] if lines else "")
