"""Step 3 under observation: it writes down what it does, and something happens to it at a given place.

    WATCH=folder/watch.json deepspeed ... scripts/harness/step3_rlhf.py FLAGS

WATCH names a JSON file, of which each key may be left out; what is written stands beside it:

    phases: true      `phases` gets a line of JSON where a rank enters a phase, or begins to write beside training
    faults: [...]     each `Fault` happens where its rank enters its phase; `fault0` and so on say when that was
    records: true     `state/MODEL/rank_00000.safetensors`: what each rank's engines hold before the first step that is
                      trained, as in a checkpoint; `modules/MODEL.safetensors`: full weights, gathered by ZeRO;
                      `responses.RANK.jsonl`: (step, prompt, sample, tokens) of each response
    extension: NAME   this extension of DeepSpeed's is loaded with the models
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project, where this is run by a launcher

import training.runtime.import_errors  # noqa: F401  before what may not be there

# isort: split
import json
import os
import signal
import time
from dataclasses import asdict, dataclass

import psutil
import torch
from safetensors.torch import save_file

from engine import distributed
from engine.rlhf_engine import RLHFEngine
from engine.zero.extensions import load_extension
from scripts.harness.weights import full_state
from training import step3_rlhf, tools
from training.checkpoints.files import rank_file, write_shards
from training.checkpoints.saving import PendingPoint
from training.ppo_trainer import StepReport
from training.runtime.processes import Place

WRITING = "writing beside training"


@dataclass(frozen=True)
class Fault:
    """A signal that a process gets when a rank enters a phase of a step.

    up: 0 for the rank itself, 1 for what started it, 2 for what started that. signal: "error" for an exception,
    "memory" for one that says that memory has run out, None where something else is done to the rank then, which waits
    for it.
    """

    phase: str
    step: int
    rank: int = 0
    signal: str | None = "SIGTERM"
    up: int = 0

    def happen(self) -> None:
        """Do it, to this process or to one above it."""
        if self.signal == "error":
            raise ArithmeticError("made up")
        if self.signal == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        time.sleep(0.3)  # in the middle of the phase
        if self.signal is not None:
            processes = [psutil.Process(), *psutil.Process().parents()]
            processes[self.up].send_signal(getattr(signal, self.signal))
        if self.up or self.signal is None:
            time.sleep(3)  # until the ranks have noticed: steps are short here


def write_watch(folder: Path, faults: tuple[Fault, ...] = (), **keys) -> dict[str, str]:
    """Write the file; returns the variable that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "watch.json"
    path.write_text(json.dumps({"faults": [asdict(fault) for fault in faults], **keys}))
    return {"WATCH": str(path)}


def watch(folder: Path, phases: bool = False, faults: tuple = (), records: bool = False, extension: str = "") -> None:
    """Have step 3 do what the file says, whose keys these are."""
    enter, write = Place.enter, PendingPoint._run
    laid = [Fault(**fault) for fault in faults]

    def announce(phase: str, step: int) -> None:
        if not phases:
            return
        line = {"phase": phase, "step": step, "rank": _rank(), "pid": os.getpid(), "time": time.time()}
        descriptor = os.open(folder / "phases", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, json.dumps(line).encode() + b"\n")  # one write, so that lines of processes do not mix
        os.close(descriptor)

    def enter_and_tell(place: Place, phase: str) -> None:
        announce(phase, place.step)
        enter(place, phase)
        for number, fault in enumerate(laid):
            marker = folder / f"fault{number}"
            if not marker.exists() and (fault.phase, fault.step, fault.rank) == (phase, place.step, _rank()):
                marker.write_text(str(time.time()))
                fault.happen()
        if extension and phase == "loading models":
            load_extension(extension)

    def write_and_tell(point: PendingPoint) -> None:
        announce(WRITING, point.step)
        write(point)
        announce(f"{WRITING} done", point.step)

    Place.enter, PendingPoint._run = enter_and_tell, write_and_tell
    if records:
        record(folder)


def record(folder: Path) -> None:
    """Have step 3 write down what engines hold and what steps draw."""
    train = step3_rlhf.train

    def train_and_record(args, plan, trainer, session) -> None:
        write_state(folder, trainer.models)
        step = trainer.step

        def step_and_note(*given) -> StepReport:
            report = step(*given)
            note_responses(folder / f"responses.{distributed.rank()}.jsonl", report)
            return report

        trainer.step = step_and_note
        train(args, plan, trainer, session)

    step3_rlhf.train = train_and_record


def write_state(folder: Path, models: RLHFEngine) -> None:
    """All ranks call this."""
    (folder / "modules").mkdir(parents=True, exist_ok=True)
    for name, model in models.trained.items():
        write_shards(folder / "state" / name / rank_file(distributed.rank()), model.shards())
        weights = full_state(model.module.model)
        if weights:
            save_file(weights, folder / "modules" / f"{name}.safetensors")
    if models.ema is not None:
        write_shards(folder / "state" / "ema" / rank_file(distributed.rank()), models.ema.shards())


def note_responses(path: Path, report: StepReport) -> None:
    """Add a step's lines."""
    rollout = report.batch.rollout
    with path.open("a") as file:
        for row in range(len(rollout)):
            tokens = rollout.responses[row][rollout.response_mask[row]].tolist()
            line = [report.step, int(rollout.indices[row]), int(rollout.samples[row]), tokens]
            file.write(json.dumps(line) + "\n")


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


if __name__ == "__main__":
    file = Path(os.environ["WATCH"])
    watch(file.parent, **json.loads(file.read_text()))
    step3_rlhf.program(tools.callbacks())
