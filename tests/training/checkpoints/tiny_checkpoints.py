"""Checkpoints of a model that is none: two tensors, a state that is a number, and what damages files."""

from pathlib import Path

import torch

from engine.zero.training_state import Shard
from training.checkpoints.conditions import Conditions
from training.checkpoints.files import Schedule
from training.checkpoints.saving import CheckpointWriter

SETTINGS = {"--seed": 1, "--dtype": "fp32"}


class TinyModel:
    """Weights (2, 3) and a vector, as one rank's shards in three runs."""

    def __init__(self, fill: float = 0.0):
        self.matrix, self.vector = torch.arange(6.0).view(2, 3) + fill, torch.full((4,), fill, dtype=torch.bfloat16)

    def shards(self) -> list[Shard]:
        """The matrix in two runs, out of order."""
        flat = self.matrix.view(-1)
        return [
            Shard("weights/matrix", (2, 3), 4, flat[4:]),
            Shard("weights/matrix", (2, 3), 0, flat[:4]),
            Shard("frozen/vector", (4,), 0, self.vector),
        ]

    def scalars(self) -> dict:
        """A step count."""
        return {"adam_steps": 3, "loss_scale": {}}


class TinyRun:
    """Checkpoints of a run whose weights are the number of its step."""

    def __init__(self, output_dir: Path, resumed: Path | None = None, scores=None, **schedule):
        self.model, self.said, self.step = TinyModel(), [], 0
        self.checkpoints = CheckpointWriter(
            output_dir,
            Schedule(**schedule),
            models={"actor": self.model},
            state=lambda: {"steps_done": self.step, "samples": 8 * self.step},
            conditions=Conditions(SETTINGS),
            config_files={"actor/config.json": b"{}"},
            resumed=resumed,
            scores=scores,
            say=self.said.append,
        )

    def train_to(self, last: int, scores: dict[int, float] | None = None) -> None:
        """Steps up to `last`, and then wait for what is being written."""
        while self.step < last:
            self.step += 1
            self.model.matrix.fill_(self.step)
            self.checkpoints.save_if_due(self.step, (scores or {}).get(self.step))
        self.checkpoints.wait()


def write_checkpoints(output_dir: Path, *steps: int) -> list[Path]:
    """Checkpoints of these steps; returns their folders."""
    run = TinyRun(output_dir)
    for step in steps:
        run.step = step
        run.model.matrix.fill_(step)
        run.checkpoints.save(step, wait=True)
    return [output_dir / "checkpoints" / f"step_{step:06d}" for step in steps]


def flip_bit(path: Path, place: float = 0.5) -> None:
    """Change one bit of a file, without a change to its size."""
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)
