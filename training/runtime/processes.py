"""Facts about processes: the phase and the step of this process, and what the kernel knows about processes.

`place` has the phase of this process, the phase's start, the step, and the seconds spent in all phases, for messages.
The kernel tells which processes share a space of process ids, a process's state, and whether the launchers of this
process still exist.
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
# Phases in which one rank may be busy without a time limit while the others wait for it. In the phase "normalising"
# each rank samples responses on its own.
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
    """What this process is doing. phase: the present phase. step: the number of the step that is being made, from 1; 0
    before the first step. since, entered: time.time() and time.monotonic() at the beginning of the phase; setting the
    clock changes only the former. changed: function that is called at the beginning of each phase."""

    phase: str = OUTSIDE
    step: int = 0
    since: float = field(default_factory=time.time)
    entered: float = field(default_factory=time.monotonic)
    changed: Callable[[], None] = field(default=lambda: None)
    _seconds: dict[str, float] = field(default_factory=dict)
    _counted: float = field(default_factory=time.monotonic)

    def enter(self, phase: str) -> None:
        """Begin the phase with this name."""
        self._count()
        self.phase = phase
        self.since = time.time()
        self.entered = time.monotonic()
        self.changed()

    def take_seconds(self) -> dict[str, float]:
        """{phase: seconds spent in it} since the last call, or since the process began. The seconds add up to the time
        that has passed.

        If a phase is within another phase, its time counts for the inner phase only.
        """
        self._count()
        taken, self._seconds = self._seconds, {}
        return taken

    def _count(self) -> None:
        now = time.monotonic()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._counted
        self._counted = now


def _began() -> float:
    """The time at which this process began, by time.monotonic(). Times that are counted from then on include the
    imports."""
    return time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())


place = Place(_counted=_began())
"""The Place of this process."""


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Within this block this process is in the phase `name`; after the block it is in the earlier phase again."""
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
SET_BY_LAUNCHERS = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")  # variables that DeepSpeed's and torch's launchers set


def this_machine() -> str | None:
    """A text that is the same for all processes that can see each other: the id of the machine's boot and the id of the
    container's process namespace. None if the kernel does not provide them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def state_of(pid: int) -> str | None:
    """The kernel's state of a process, such as "R", "S", or "T" if it is stopped; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # after the process's name: proc(5)
    except OSError:
        return None


def is_another_rank(pid: int) -> bool:
    """Whether the process `pid` is another rank: a process of the same user whose command line is equal to that of this
    process, except for --local_rank."""

    def words(pid: int) -> list[bytes]:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return [word for word in words if not word.startswith(b"--local_rank=")]

    try:
        same_user = Path(f"/proc/{pid}").stat().st_uid == os.getuid()
        return pid != os.getpid() and same_user and words(pid) == words(os.getpid())
    except OSError:
        return False


class Launchers:
    """The launchers of this rank that existed when this object was made.

    A launcher is recognised by its command line. A shell, `nohup` or a job's script is not a launcher: if it ends, the
    run goes on. The parent processes of a rank include the node's launcher, and the launcher that the user called if
    this was on this machine. With several nodes, DeepSpeed's runner starts the nodes' launchers by ssh. On its own
    machine, the runner is recognised by the ranks' flags on its command line.
    """

    def __init__(self) -> None:
        self._gone: str | None = None
        self._found = [process for process in psutil.Process().parents() if program_of(_words(process)) in LAUNCHERS]
        programs = [program_of(_words(process)) for process in self._found]
        if not programs and any(name in os.environ for name in SET_BY_LAUNCHERS):
            self._gone = "the launcher"  # it ended while this process was importing
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
        """Text that names the first launcher found to have ended, with its process id; None while all exist."""
        if self._gone is None:
            dead = (process.pid for process in self._found if not _lives(process))
            self._gone = next((f"the launcher (process {pid})" for pid in dead), None)
        return self._gone


def program_of(words: Sequence[str]) -> str:
    """The program of a command line: "deepspeed.launcher.launch" for `python -u -m deepspeed.launcher.launch
    --world_info=`, "torchrun" for `/usr/bin/python /usr/bin/torchrun`."""
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
