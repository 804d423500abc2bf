"""Restart points: everything that changes during a run, in one folder that is there complete or not at all.

    checkpoints/step_000100/
        actor/ critic/          DeepSpeed's checkpoints; critic/ if there is one
        ema_rank0.pt ...        each rank's share of the averaged weights, if there are any
        trainer_state.json      training/restarts/conditions.py says what stands there; written last

A point is written under another name and renamed when complete, so a kill in between leaves the ones before it alone.
"""

import shutil
from pathlib import Path

import torch

from engine import distributed
from engine.rlhf_engine import RLHFEngine
from training.program.output_folder import CHECKPOINTS
from training.restarts.conditions import Conditions, state_file
from training.restarts.resume_point import STATE_FILE, ResumePoint


def save(output_dir: Path, models: RLHFEngine, trainer_state: dict, conditions: Conditions) -> Path:
    """Write the restart point of `trainer_state["steps_done"]` (all ranks call this); returns its folder."""
    final = output_dir / CHECKPOINTS / f"step_{trainer_state['steps_done']:06d}"
    partial = final.with_name(final.name + ".partial")
    if distributed.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    distributed.barrier()
    for role, model in models.trained.items():
        model.save_checkpoint(str(partial), role)
    if models.ema is not None:
        torch.save(models.ema.state_dict(), partial / f"ema_rank{distributed.rank()}.pt")
    distributed.barrier()
    if distributed.is_main():
        (partial / STATE_FILE).write_text(state_file(trainer_state, conditions, models.ema is not None))
        shutil.rmtree(final, ignore_errors=True)  # an earlier run's, overwritten on request or trained anew
        partial.replace(final)
    distributed.barrier()
    return final


def load(point: ResumePoint, models: RLHFEngine) -> None:
    """Put the models back to a restart point that was found for them (all ranks call this)."""
    for role, model in models.trained.items():
        model.load_checkpoint(str(point.folder), role)
    if models.ema is not None:
        share = torch.load(point.folder / f"ema_rank{distributed.rank()}.pt", weights_only=True)
        models.ema.load_state_dict(share)
