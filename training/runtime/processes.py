"""Facts about processes: the place of this process in its run, and the kernel's facts about it and others.

`place` has the phase and its start, the step, and the seconds that phases took, for messages about this process. The
kernel tells which processes share process numbers, the state of a process and when it began, and whether the launchers
of this process are still there.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

OUTSIDE = "outside of training"
# Phases in which one rank may be busy for as long as it takes, while the others wait for it.
# Normalising, ranks sample responses apart.
ALONE = (
    OUTSIDE,
    "reading data",
    "loading models",
    "writing a checkpoint",
    "normalising",
    "saving models",
    "uploading",
)


@dataclass
class Place:
    """step: the one being trained, from 1; 0 before. since: by time.time(). changed: called with each new phase."""

    phase: str = OUTSIDE
    step: int = 0
    since: float = field(default_factory=time.time)
    changed: Callable[[], None] = field(default=lambda: None)
    _seconds: dict[str, float] = field(default_factory=dict)
    _counted: float = field(default_factory=time.monotonic)

    def enter(self, phase: str) -> None:
        """Go on with a phase."""
        self._count()
        self.phase, self.since = phase, time.time()
        self.changed()

    def take_seconds(self) -> dict[str, float]:
        """Seconds of each phase since the last call, or since the process began; they add up to all that have passed.

        Time in a phase within another one is the inner one's.
        """
        self._count()
        taken, self._seconds = self._seconds, {}
        return taken

    def _count(self) -> None:
        now = time.monotonic()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._counted
        self._counted = now


def _began() -> float:
    """When this process began, by time.monotonic(): its imports are part of the run."""
    return time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())


place = Place(_counted=_began())
"""This process's."""


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what the block does; what was done before goes on behind it."""
    before = place.phase
    place.enter(name)
    try:
        yield
    finally:
        place.enter(before)


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


def this_machine() -> str | None:
    """A text that is equal for processes that can see each other: the boot of the machine and the container's namespace
    of process numbers; None where the kernel does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def state_of(pid: int) -> str | None:
    """The state of a process by the kernel: "R", "S", "T" where it is stopped; None where it is not there."""
    fields = _fields(pid)
    return fields[0] if fields else None


def start_of(pid: int) -> str | None:
    """When a living process began, in ticks since the machine did; None for one that is gone or only waited for."""
    fields = _fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def _fields(pid: int) -> list[str]:
    """Those behind the name, which may hold anything: from the state on (proc(5)); none where there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_another_rank(pid: int) -> bool:
    """Whether this is another process of this user with the same command line; ranks differ in --local_rank only."""

    def words(pid: int) -> list[bytes]:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return [word for word in words if not word.startswith(b"--local_rank=")]

    try:
        same_user = Path(f"/proc/{pid}").stat().st_uid == os.getuid()
        return pid != os.getpid() and same_user and words(pid) == words(os.getpid())
    except OSError:
        return False


class Launchers:
    """The launchers of this rank that were there when this was made.

    A launcher is recognised by its command line. A shell, `nohup` or a job's script is none, and its end ends no run.
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
                flags = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
                self._found += [
                    process
                    for process in psutil.process_iter()
                    if program_of(words := _words(process)) in RUNNERS and words[len(words) - len(flags) :] == flags
                ]
            else:
                self._gone = "deepspeed"

    def gone(self) -> str | None:
        """The first that is no longer there, by its process id; None while all are."""
        if self._gone is None:
            dead = (process.pid for process in self._found if not _lives(process))
            self._gone = next((f"the launcher (process {pid})" for pid in dead), None)
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
