"""Checkpoints of the ranks of a test: written, and gone on from."""

from pathlib import Path

from engine import distributed
from engine.rlhf_engine import RLHFEngine
from training.checkpoints.conditions import Conditions
from training.checkpoints.files import Schedule, config_files
from training.checkpoints.resuming import ResumePoint, restore
from training.checkpoints.saving import Checkpoints


def save_point(output: str | Path, models: RLHFEngine, state: dict) -> Path:
    """Write the checkpoint of these models; returns its folder."""
    checkpoints = Checkpoints(
        Path(output),
        Schedule(),
        models=models.trained,
        ema=models.ema,
        reference=models.kept_reference,
        state=lambda: state,
        conditions=Conditions(),
        config_files=config_files(models.trained, models.tokenizer) if distributed.is_main() else {},
    )
    point = checkpoints.save(state["steps_done"], wait=True)
    assert point is not None
    return point


def load_point(output: str | Path, models: RLHFEngine) -> dict:
    """Put the models to the newest checkpoint; returns its state."""
    point = ResumePoint.find(str(output), str(output), with_ema=models.ema is not None)
    restore(point, models.trained, models.ema, models.kept_reference)
    return point.state
