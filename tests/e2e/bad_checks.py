"""Checks of scripts/gpu_checks that end in every way there is. They import nothing that takes time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu_checks.check import Skipped, Trial


def passes(trial: Trial) -> None:
    trial.tell({"rows": 3})
    assert trial.needs_gpu("a graph") is False


def misses(trial: Trial) -> None:
    trial.tell({"share": 0.25})
    trial.expect(True, "not told", "not told")
    trial.expect(False, "a quarter is too little", "Give it a half.")
    trial.find(False, "not told", "not told")
    trial.find(True, "a third would be | better", "Give it a third.")
    with trial.part("stage 1"):
        raise ValueError("of shape\n(2, 3)")
    with trial.part("stage 2"):
        trial.tell({"later": 1})


def raises(trial: Trial) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def skips(trial: Trial) -> None:
    raise Skipped("nothing of the kind is installed")


def crashes(trial: Trial) -> None:
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(trial: Trial) -> None:
    with trial.part("stage 0"):
        trial.tell({"stage 0, s": 1.5})
    with trial.part("stage 1"):
        raise ValueError("no weight changed")
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (trial.folder / "pid").write_text(str(other.pid))
    time.sleep(600)


def leaves(trial: Trial) -> None:
    sys.exit(3)


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False
