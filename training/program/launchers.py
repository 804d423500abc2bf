"""The launchers that a rank was started by, and whether they are still there.

A launcher is known by its command line: a shell, `nohup` or a job's script that ends is none, and ends no run.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

RUNNERS = ("deepspeed", "ds", "deepspeed.launcher.runner", "runner.py")
PER_NODE = "deepspeed.launcher.launch"
LAUNCHERS = (
    *RUNNERS,
    PER_NODE,
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("accelerate", "accelerate.commands.launch"),
    *("mpirun", "mpiexec"),
)
SET_BY_LAUNCHERS = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")  # in the environment of ranks: DeepSpeed's and torch's


class Launchers:
    """Those that were there when this was made.

    Above a rank stand the node's launcher and, where it was started on this machine, the one that the user called.
    DeepSpeed's runner starts the launchers of several nodes by ssh: it is found, on the machine where it runs, by the
    flags that it was given for the ranks.
    """

    def __init__(self) -> None:
        self._gone: str | None = None
        self._found = [process for process in psutil.Process().parents() if program_of(_words(process)) in LAUNCHERS]
        programs = [program_of(_words(process)) for process in self._found]
        if not programs and any(name in os.environ for name in SET_BY_LAUNCHERS):
            self._gone = "the launcher"  # while this process was importing
        elif PER_NODE in programs and not set(RUNNERS) & set(programs):
            if any(word.startswith("--node_rank") for word in _words(self._found[programs.index(PER_NODE)])):
                self._found += _runners_elsewhere(sys.argv)
            else:
                self._gone = "deepspeed"

    def gone(self) -> str | None:
        """The first that is no longer there, by its program and process id; None while all are."""
        if self._gone is None:
            self._gone = next((_described(process) for process in self._found if not _lives(process)), None)
        return self._gone


def program_of(words: Sequence[str]) -> str:
    """What a command line runs: "deepspeed.launcher.launch" for `python -u -m deepspeed.launcher.launch --world_info=`,
    "torchrun" for `/usr/bin/python /usr/bin/torchrun`."""
    if not words:
        return ""
    name = Path(words[0]).name
    if not name.startswith("python"):
        return name
    for place, word in enumerate(words[1:], start=1):
        if word == "-m":
            return words[place + 1] if place + 1 < len(words) else ""
        if not word.startswith("-"):
            return Path(word).name
    return ""


def _runners_elsewhere(argv: Sequence[str]) -> list[psutil.Process]:
    """DeepSpeed's runners on this machine that were given this rank's flags."""
    flags = [word for word in argv[1:] if not word.startswith("--local_rank")]
    return [
        process
        for process in psutil.process_iter()
        if program_of(words := _words(process)) in RUNNERS and words[len(words) - len(flags) :] == flags
    ]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _described(process: psutil.Process) -> str:
    return f"the launcher (process {process.pid})"
