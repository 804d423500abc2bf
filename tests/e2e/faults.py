"""Runs of step 3 in which something happens to a process at a given place, in a test or a trial.

    fault = Fault(phase="train", step=2, rank=1, signal="SIGKILL")
    ended = FaultyRun(folder, tiny, ["deepspeed", "--num_gpus", "2"]).run(fault)

The program is the real one; a few lines before it lay the fault where it enters a phase.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.e2e.chain import MACHINE
from tests.e2e.programs import Tiny, command_line, metric_lines

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

sys.path.insert(0, ROOT)
import psutil
from training.program import phases

faults = json.loads(os.environ["FAULTS"])
enter = phases.Place.enter


def faulty(place, phase):
    enter(place, phase)
    here = {"phase": phase, "step": place.step, "rank": int(os.environ.get("RANK", 0))}
    for number, fault in enumerate(faults):
        marker = Path(__file__).with_name(f"fault{number}")
        if not marker.exists() and all(fault[name] == value for name, value in here.items()):
            marker.write_text(str(time.time()))
            happen(fault)


def happen(fault):
    if fault["signal"] == "error":
        raise ArithmeticError("made up")
    time.sleep(0.3)  # in the middle of the phase
    if fault["signal"] is not None:
        processes = [psutil.Process(), *psutil.Process().parents()]
        processes[fault["up"]].send_signal(getattr(signal, fault["signal"]))
    if fault["up"] or fault["signal"] is None:
        time.sleep(3)  # until the ranks have noticed: steps are short here


phases.Place.enter = faulty
from training import step3_rlhf

if __name__ == "__main__":
    step3_rlhf.program()
"""


@dataclass(frozen=True)
class Fault:
    """A signal that a process gets when a rank enters a phase of a step.

    up: 0 for the rank itself, 1 for what started it, 2 for what started that. signal: "error" for an exception, None
    where something else is done to the rank then.
    """

    phase: str
    step: int
    rank: int = 0
    signal: str | None = "SIGTERM"
    up: int = 0


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code, standard error, and seconds from the fault until no process of it was left."""

    code: int
    stderr: str
    seconds: float


class FaultyRun:
    """One output folder, and the command that runs in it."""

    def __init__(self, folder: Path, tiny: Tiny, launcher: list[str]):
        folder.mkdir(parents=True)
        self.folder, self.out = folder, folder / "out"
        program = folder / "step3_rlhf.py"
        program.write_text(PROGRAM.replace("ROOT", repr(str(ROOT))))
        values = tiny.flags(
            3, output_dir=self.out, max_steps=STEPS, actor_zero_stage=3, critic_zero_stage=3, save_steps=2
        )
        self.command = [*launcher, str(program), *command_line(values)]

    def run(self, *faults: Fault, more: Sequence[str] = ()) -> Ended:
        """Run it, with more flags, until no process of it is left; raises TimeoutError."""
        return self.ended(self.start(*faults, command=[*self.command, *more]))

    def start(self, *faults: Fault, command: list[str], **env: str) -> subprocess.Popen:
        """Start it, and return at once."""
        given = json.dumps([asdict(fault) for fault in faults])
        with (self.folder / "stderr").open("ab") as stderr:
            return subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "FAULTS": given, **env},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                cwd=ROOT,
                start_new_session=True,
            )

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
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.folder) in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def points(self) -> list[str]:
        """The names of its restart points."""
        return sorted(path.name for path in (self.out / "checkpoints").glob("step_*"))


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two runs that should be the same: lines of metrics, and saved models to the last bit."""
    found = []
    lines = [
        [
            {name: value for name, value in line.items() if not name.startswith((*MACHINE, "checkpoint/"))}
            for line in metric_lines(folder)
        ]
        for folder in (one, other)
    ]
    if lines[0] != lines[1]:
        found.append("metrics.jsonl")
    for model in ("actor", "critic"):
        files = [folder / model / "model.safetensors" for folder in (one, other)]
        if not all(file.is_file() for file in files) or files[0].read_bytes() != files[1].read_bytes():
            found.append(model)
    return found


def deepspeed(port: int, ranks: int = 2) -> list[str]:
    """The command of DeepSpeed's launcher."""
    name = str(Path(sys.executable).with_name("deepspeed"))
    return [name, "--quiet", "--num_gpus", str(ranks), "--master_port", str(port)]


def torchrun(port: int, ranks: int = 2) -> list[str]:
    """The command of torch's launcher."""
    return [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", str(ranks), "--master_port", str(port)]
