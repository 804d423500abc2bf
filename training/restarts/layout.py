"""Where the files of restart points stand, and which points an output folder has.

    OUTPUT_DIR/checkpoints/step_000100/     step_-00005: 5 steps of the critic's pretraining before the first step
        actor/rank_00000.safetensors ...    numbers of the actor's training state, a file for each rank that wrote
        critic/ ema/ reference/             the same of the critic, of the moving average, and of the weights of a
                                            reference that is refreshed, if there are any
        config/actor/ config/critic/        config.json and tokenizer, as beside a saved model
        trainer_state.json                  training/restarts/conditions.py says what stands there
        manifest.json                       size and hash of each of these files; written last

A point is written as step_000100.partial and renamed when it is complete. step_000100.abandoned is one that a run left
behind which then went on from an older one.
"""

import os
import re
from pathlib import Path

CHECKPOINTS = "checkpoints"
AUTO = "auto"  # for --resume: the newest point in --output_dir, if there is one
STATE_FILE, MANIFEST = "trainer_state.json", "manifest.json"
CONFIG, EMA, REFERENCE = "config", "ema", "reference"
PARTIAL, PRUNED, ABANDONED = ".partial", ".pruned", ".abandoned"


def point_folder(output_dir: Path, step: int) -> Path:
    """Where the restart point of a step stands."""
    return output_dir / CHECKPOINTS / f"step_{step:06d}"


def rank_file(rank: int) -> str:
    """The name of a rank's file of numbers."""
    return f"rank_{rank:05d}.safetensors"


def step_of(folder: Path) -> int | None:
    """The step that a folder is named after as a restart point's; None where it is not so named."""
    match = re.fullmatch(r"step_(-?\d+)", folder.name)
    return int(match[1]) if match else None


def holds_point(folder: Path) -> bool:
    """Whether the files of a restart point stand in a folder, whatever its name, or some of them."""
    return any((folder / name).is_file() for name in (MANIFEST, STATE_FILE))


def points_in(output_dir: Path) -> list[Path]:
    """The folders of restart points in a run's output folder, whole or not, by step."""
    folder = output_dir / CHECKPOINTS
    if not folder.is_dir():
        return []
    steps = {path: step_of(path) for path in folder.iterdir() if path.is_dir()}
    return sorted((path for path, step in steps.items() if step is not None), key=lambda path: (steps[path], path.name))


def unfinished_in(output_dir: Path) -> list[Path]:
    """The folders of restart points that were being written, or being deleted."""
    found = (output_dir / CHECKPOINTS).glob("step_*")
    return sorted(path for path in found if re.fullmatch(rf"step_-?\d+({PARTIAL}|{PRUNED})", path.name))


def set_aside(folder: Path) -> Path:
    """Rename a restart point, so that --resume does not find it; returns its new name."""
    names = (folder.with_name(f"{folder.name}{ABANDONED}{number}") for number in ("", *range(2, 10_000)))
    aside = next(name for name in names if not os.path.lexists(name))
    return folder.rename(aside)
