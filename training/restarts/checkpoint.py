"""Restart points: everything that changes during a run, in one folder that is there complete or not at all.

    checkpoints/step_000100/
        actor/ critic/ ema/     each rank's runs of the training state's tensors; critic/ and ema/ if there are such
        trainer_state.json      training/restarts/conditions.py says what stands there; written last

A point is written under another name and renamed when complete, so a kill in between leaves the ones before it alone.
"""

import json
import shutil
from collections import defaultdict
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine import distributed
from engine.rlhf_engine import RLHFEngine
from engine.zero.shards import Shard
from training.program.output_folder import CHECKPOINTS
from training.restarts.conditions import Conditions, state_file
from training.restarts.resume_point import STATE_FILE, ResumePoint

EMA, SCALARS = "ema", "scalars.json"


def save(output_dir: Path, models: RLHFEngine, trainer_state: dict, conditions: Conditions) -> Path:
    """Write the restart point of `trainer_state["steps_done"]` (all ranks call this); returns its folder."""
    final = output_dir / CHECKPOINTS / f"step_{trainer_state['steps_done']:06d}"
    partial = final.with_name(final.name + ".partial")
    if distributed.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    distributed.barrier()
    for role, model in models.trained.items():
        _write(partial / role, model.shards())
    if models.ema is not None:
        _write(partial / EMA, models.ema.shards())
    scalars = {role: model.scalars() for role, model in models.trained.items()}
    distributed.barrier()
    if distributed.is_main():
        (partial / SCALARS).write_text(json.dumps(scalars))
        (partial / STATE_FILE).write_text(state_file(trainer_state, conditions, models.ema is not None))
        shutil.rmtree(final, ignore_errors=True)  # an earlier run's, overwritten on request or trained anew
        partial.replace(final)
    distributed.barrier()
    return final


def load(point: ResumePoint, models: RLHFEngine) -> None:
    """Put the models back to a restart point that was found for them (all ranks call this)."""
    scalars = json.loads((point.folder / SCALARS).read_text())
    for role, model in models.trained.items():
        model.load_shards(ShardFiles(point.folder / role), scalars[role])
    if models.ema is not None:
        models.ema.load_shards(ShardFiles(point.folder / EMA))


def _write(folder: Path, shards: list[Shard]) -> None:
    folder.mkdir(exist_ok=True)
    values = {f"{shard.name}@{shard.start}": shard.values.cpu().contiguous() for shard in shards}
    shapes = json.dumps({shard.name: shard.shape for shard in shards})
    save_file(values, folder / f"rank_{distributed.rank():05d}.safetensors", metadata={"shapes": shapes})


class ShardFiles:
    """The tensors whose runs stand in a folder's files; an `engine.zero.shards.ShardSource`."""

    def __init__(self, folder: Path):
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._runs = defaultdict(list)
        for path in sorted(folder.glob("rank_*.safetensors")):
            file = safe_open(path, framework="pt")
            self._shapes |= {name: tuple(shape) for name, shape in json.loads(file.metadata()["shapes"]).items()}
            for key in file.keys():
                name, _, start = key.rpartition("@")
                self._runs[name].append((int(start), file.get_slice(key)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shape of each tensor that is there, by its name."""
        return self._shapes

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with the numbers start .. start + n of the named tensor."""
        for first, run in self._runs[name]:
            begin, end = max(start, first), min(start + len(out), first + run.get_shape()[0])
            if begin < end:
                out[begin - start : end - start] = run[begin - first : end - first]
