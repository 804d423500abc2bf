"""A program of the project on two hosts: a rank on each, by one of the three launchers, and how that ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.harness import ROOT, slurm_stand_in
from scripts.harness.hosts import TwoHosts

PORT, JOB = 29500, 4711
# What the ranks need of this environment, and deepspeed does not pass on by itself.
BY_PDSH = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "TMPDIR", "WATCH")
BY_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
INTERVAL = 0.1  # seconds between looks
TORCHRUN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    codes: of what was started on each host. text: all that was printed, without pdsh's names before lines and
    torchrun's own stack trace. seconds: from the call until no process was left on either host; None where some were,
    which have then been killed: those are `left`.
    """

    codes: dict[str, int]
    text: str
    seconds: float | None
    left: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """The largest exit code."""
        return max(self.codes.values())

    @property
    def messages(self) -> list[str]:
        """The different lines that say why a run ends."""
        lines = [line for line in self.text.splitlines() if line.startswith(("error: ", "stopped: ", "rank "))]
        return list(dict.fromkeys(lines))


class Launched:
    """A run under way. folder: holds what each host prints."""

    def __init__(self, hosts: TwoHosts, processes: Mapping[str, subprocess.Popen], folder: Path):
        self.hosts = hosts
        self.processes = dict(processes)
        self.folder = folder

    def running(self) -> bool:
        """Whether all that was started is still there."""
        return all(process.poll() is None for process in self.processes.values())

    def wait_for(self, happened: Callable[[], bool], seconds: float = 300.0) -> bool:
        """Wait until this has happened; false where the run ended first, or the time is over."""
        deadline = time.monotonic() + seconds
        while not happened():
            if not self.running() or time.monotonic() > deadline:
                return False
            time.sleep(INTERVAL)
        return True

    def end(self, within: float) -> Ended:
        """Wait until no process of it is left on either host, at most so many seconds; then kill what is left."""
        began, left = time.monotonic(), self._left()
        while left and time.monotonic() < began + within:
            time.sleep(INTERVAL)
            left = self._left()
        seconds = None if left else time.monotonic() - began
        for name in self.hosts.names:
            for pid in self.hosts.processes(name):
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
        codes = {name: process.wait() for name, process in self.processes.items()}
        return Ended(codes, _plain((self.folder / f"{name}.log").read_text() for name in codes), seconds, tuple(left))

    def _left(self) -> list[str]:
        begun = {name: process.pid for name, process in self.processes.items() if process.poll() is None}
        there = {(name, pid) for name in self.hosts.names for pid in self.hosts.processes(name)} | begun.items()
        return [f"{name}: {_command(pid)}" for name, pid in sorted(there)]  # what has just begun is in no host yet


def launch(
    launcher: str, hosts: TwoHosts, program: Path, words: Sequence[str], folder: Path, **settings: str
) -> Launched:
    """Start a program by "deepspeed", "torchrun" or "slurm"; what it prints goes into `folder`. settings: variables."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_") and name not in BY_LAUNCHERS
    } | settings
    commands = {"deepspeed": _deepspeed, "torchrun": _torchrun, "slurm": _slurm}[launcher](
        hosts, program, list(words), folder, environment
    )
    processes = {}
    for name, command in commands.items():
        with (folder / f"{name}.log").open("wb") as log:
            processes[name] = hosts.start(name, command, env=environment, cwd=ROOT, stdout=log)
    return Launched(hosts, processes, folder)


def _deepspeed(hosts, program, words, folder, environment) -> dict[str, list[str]]:
    passed_on = folder / "deepspeed_env"
    passed_on.write_text("".join(f"{name}={environment[name]}\n" for name in BY_PDSH if name in environment))
    environment |= {**hosts.ssh_environment, "DS_ENV_FILE": str(passed_on)}
    command = [_own("deepspeed"), "--hostfile", str(hosts.hostfile), "--master_port", str(PORT)]
    return {hosts.names[0]: [*command, str(program), *words]}


def _torchrun(hosts, program, words, folder, environment) -> dict[str, list[str]]:
    where = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", hosts.names[0], "--master_port", str(PORT)]
    return {
        name: [_own("torchrun"), *where, "--node_rank", str(number), str(program), *words]
        for number, name in enumerate(hosts.names)
    }


def _slurm(hosts, program, words, folder, environment) -> dict[str, list[str]]:
    if not (folder / "bin").exists():
        slurm_stand_in.install(folder / "bin")
    environment |= slurm_stand_in.batch_environment(hosts.names, JOB)
    environment["TWO_HOSTS"] = json.dumps({name: hosts.inside(name, []) for name in hosts.names})
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    return {hosts.names[0]: ["bash", str(ROOT / "scripts" / "slurm.sh"), str(program), *words]}


def _own(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def _plain(logs) -> str:
    """What was printed, without pdsh's "node-b: " and without torchrun's own stack trace."""
    lines: list[str] = []
    for log in logs:
        for line in log.splitlines():
            for name in TwoHosts.names:
                line = line.removeprefix(f"{name}: ")
            if line.startswith(TORCHRUN):
                del lines[max(at for at, earlier in enumerate(lines) if earlier.startswith("Traceback")) :]
            lines.append(line)
    return "\n".join(lines) + "\n"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "ended"
