"""Restart points: everything that changes during a run, in one folder that is there whole or not at all.

    checkpoints/step_000100/
        actor/ critic/          DeepSpeed's checkpoints; critic/ if there is one
        ema_rank0.pt ...        each rank's share of the averaged weights, if there are any
        trainer_state.json      steps, controllers, world size; written last

A point is written under another name and renamed when complete, so a kill in between leaves the ones before it alone.
"""

import json
import re
import shutil
from pathlib import Path

import torch

from engine import distributed
from engine.errors import UserError
from engine.rlhf_engine import RLHFEngine
from training.program.startup import CHECKPOINTS

STATE_FILE = "trainer_state.json"


def save(output_dir: Path, engine: RLHFEngine, state: dict) -> Path:
    """Write the restart point of `state["steps_done"]` (all ranks call this); returns its folder."""
    final = output_dir / CHECKPOINTS / f"step_{state['steps_done']:06d}"
    partial = final.with_name(final.name + ".partial")
    if distributed.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    distributed.barrier()
    for role, model in engine.trained.items():
        model.save_checkpoint(str(partial), role)
    if engine.ema is not None:
        torch.save(engine.ema.state_dict(), partial / f"ema_rank{distributed.rank()}.pt")
    distributed.barrier()
    if distributed.is_main():
        state = {**state, "world_size": distributed.world_size(), "ema": engine.ema is not None}
        (partial / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
        shutil.rmtree(final, ignore_errors=True)  # an earlier run's, overwritten on request or trained anew
        partial.replace(final)
    distributed.barrier()
    return final


DATA = "the data"  # whose fingerprints say nothing to people


def find(path: str) -> tuple[Path, dict]:
    """The restart point at `path`, or the newest one in a run's output folder, and its state.

    Raises: UserError if there is none, or it was written by another number of ranks.
    """
    folder = Path(path)
    if not (folder / STATE_FILE).is_file():
        points = _points(folder)
        if not points:
            raise UserError(
                f"--resume {path}: no restart point there. Give a folder .../checkpoints/step_N, or the "
                "output folder of a run that wrote some (--save_steps)."
            )
        folder = points[-1]
    try:
        state = json.loads((folder / STATE_FILE).read_text())
        missing = {"world_size", "ema", "identity"} - set(state)
    except (ValueError, TypeError) as error:
        raise UserError(f"--resume: {folder / STATE_FILE} is broken ({error}). Use an earlier restart point.") from None
    if missing:
        raise UserError(
            f"--resume: {folder / STATE_FILE} lacks {', '.join(sorted(missing))}. Use an earlier restart point."
        )
    if state["world_size"] != distributed.world_size():
        raise UserError(
            f"--resume {folder}: written by {state['world_size']} ranks, this run has "
            f"{distributed.world_size()}. DeepSpeed's partitions fit the same number only."
        )
    return folder, state


def _points(output_dir: Path) -> list[Path]:
    """The complete restart points of a run, oldest first."""
    return sorted(
        path.parent
        for path in output_dir.glob(f"{CHECKPOINTS}/step_*/{STATE_FILE}")
        if re.fullmatch(r"step_\d+", path.parent.name)
    )


def set_aside_newer(output_dir: Path, step: int) -> None:
    """Rename the restart points after `step` to step_N.abandoned (rank 0 does): a run that goes on from an older point
    takes another course, and the next --resume must not find the course it left."""
    if distributed.is_main():
        for point in _points(output_dir):
            if int(point.name.removeprefix("step_")) > step:
                aside = point.with_name(point.name + ".abandoned")
                shutil.rmtree(aside, ignore_errors=True)
                point.replace(aside)
    distributed.barrier()


def check_identity(folder: Path, state: dict, identity: dict) -> None:
    """Raise UserError if the run differs from the restart point's in what its course depends on."""
    for name, value in identity.items():
        then = state["identity"].get(name)
        if then != value and name == DATA:
            raise UserError(
                f"--resume {folder}: the prompts, the held-out ones or the texts are others than when it "
                "was written. Give the same data as when the run began."
            )
        if then != value:
            raise UserError(
                f"--resume {folder}: {name} was {then!r} when it was written and is {value!r} now. Give "
                "the same flags and data as when the run began."
            )


def check_ema(folder: Path, state: dict, wanted: bool) -> None:
    """Raise UserError if the restart point and the run disagree on having an EMA."""
    if state["ema"] != wanted:
        raise UserError(
            f"--resume {folder}: written {'with' if state['ema'] else 'without'} --enable_ema. "
            "Give the same flags as when the run began."
        )


def load(folder: Path, engine: RLHFEngine, state: dict) -> None:
    """Put the engines back to a restart point (all ranks call this).

    Raises: UserError if the point and the run disagree on having an EMA.
    """
    check_ema(folder, state, engine.ema is not None)
    for role, model in engine.trained.items():
        model.load_checkpoint(str(folder), role)
    if engine.ema is not None:
        engine.ema.load_state_dict(torch.load(folder / f"ema_rank{distributed.rank()}.pt", weights_only=True))
