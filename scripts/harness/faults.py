"""Runs of step 3 in which something happens to a process at a given place.

    run = FaultyRun(folder, tiny, by_torchrun)
    ended = run.run(Fault(phase="train", step=2, rank=1, signal="SIGKILL"))

`Fault` says what may happen; what then becomes of the run is `Ended`.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.harness import ROOT, step3_rlhf
from scripts.harness.programs import Tiny, begun, command_line
from scripts.harness.step3_rlhf import Fault, write_watch

STEPS = 4


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code, standard error, and seconds from the fault until no process of it was left."""

    code: int
    stderr: str
    seconds: float


class FaultyRun:
    """One output folder, and the command that runs in it.

    launcher: programs.by_deepspeed or programs.by_torchrun, or what else makes a command of a program and its words.
    """

    def __init__(self, folder: Path, tiny: Tiny, launcher: Callable[[str, list[str]], list[str]]):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.out = folder, folder / "out"
        values = tiny.flags(
            3, output_dir=self.out, max_steps=STEPS, actor_zero_stage=3, critic_zero_stage=3, save_steps=2
        )
        self.command = launcher(step3_rlhf.__file__, command_line(values))

    def run(self, *faults: Fault, more: Sequence[str] = ()) -> Ended:
        """Run it, with more flags, until no process of it is left; raises TimeoutError."""
        return self.ended(self.start(*faults, command=[*self.command, *more]))

    def start(self, *faults: Fault, command: list[str], **env: str) -> subprocess.Popen:
        """Start it, and return at once."""
        watched = write_watch(self.folder, faults)
        with (self.folder / "stderr").open("ab") as stderr:
            return begun(command, 2, watched | env, stdout=subprocess.DEVNULL, stderr=stderr, cwd=ROOT)

    def ended(self, process: subprocess.Popen, timeout: float = 600.0) -> Ended:
        """Wait until no process of the run is left."""
        deadline = time.monotonic() + timeout
        try:
            process.wait(timeout)
            while self.processes():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"left behind: {self.processes()}")
                time.sleep(0.2)
        finally:
            for left in self.processes():
                with contextlib.suppress(psutil.Error):
                    left.kill()
        marker = self.folder / "fault0"
        at = float(marker.read_text()) if marker.exists() else time.time()
        return Ended(process.returncode, (self.folder / "stderr").read_text(), time.time() - at)

    def processes(self) -> list[psutil.Process]:
        """Those that have the run's folder on their command lines."""
        every = psutil.process_iter(["cmdline"])
        return [process for process in every if str(self.folder) in " ".join(process.info["cmdline"] or [])]

    def points(self) -> list[str]:
        """The names of its checkpoints."""
        return sorted(path.name for path in (self.out / "checkpoints").glob("step_*"))
