"""The restart point that a run goes on from, and the others that stand beside it."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from engine import distributed
from engine.errors import UserError
from training.program.output_folder import CHECKPOINTS
from training.restarts.conditions import Conditions, check_fit

STATE_FILE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A restart point, found once in a run and handed on.

    folder: .../checkpoints/step_N. state: what its state file holds; training/restarts/conditions.py says what that is.
    in_output_dir: whether its run stands in this run's --output_dir, where the curves then go on.
    """

    folder: Path
    state: dict
    in_output_dir: bool = False

    @classmethod
    def find(cls, path: str, *, with_ema: bool, output_dir: str | None = None) -> "ResumePoint":
        """The restart point at `path`, or the newest one in a run's output folder.

        Args:
            with_ema: whether the run that goes on keeps a moving average.
            output_dir: where it writes.

        Raises: UserError if there is none, if its state file is broken, or if its files do not fit the run.
        """
        folder = Path(path)
        if not (folder / STATE_FILE).is_file():
            points = restart_points(folder)
            if not points:
                raise UserError(
                    f"--resume {path}: no restart point there. Give a folder .../checkpoints/step_N, or the "
                    "output folder of a run that wrote some (--save_steps)."
                )
            folder = points[-1]
        state = _read(folder / STATE_FILE)
        check_fit(state, folder, with_ema)
        in_output_dir = output_dir is not None and folder.resolve().parent.parent == Path(output_dir).resolve()
        return cls(folder, state, in_output_dir)

    @property
    def steps_done(self) -> int:
        """How many steps had been trained when it was written."""
        return self.state["steps_done"]

    def check(self, conditions: Conditions, last_step: int) -> None:
        """Raise UserError if a run under these conditions, up to this step, cannot go on from here.

        Each rank calls this for itself, so that a node on which the folder is not there is named.
        """
        if not self.folder.is_dir():
            raise UserError(
                f"--resume {self.folder}: not there on rank {distributed.rank()}. Put the restart point where every "
                "node sees it."
            )
        conditions.check(Conditions.read(self.state), self.folder)
        if self.steps_done > last_step:
            raise UserError(
                f"--resume {self.folder}: it stands at step {self.steps_done}, behind the run's last "
                f"step {last_step}. Raise --max_steps or --num_train_epochs."
            )


def set_aside_newer(output_dir: Path, step: int) -> None:
    """Rename the restart points after `step` to step_N.abandoned (rank 0 does): a run that goes on from an older point
    takes another course, and the next --resume must not find the course it left."""
    if distributed.is_main():
        for point in restart_points(output_dir):
            if int(point.name.removeprefix("step_")) > step:
                aside = point.with_name(point.name + ".abandoned")
                shutil.rmtree(aside, ignore_errors=True)
                point.replace(aside)
    distributed.barrier()


def restart_points(output_dir: Path) -> list[Path]:
    """The complete restart points of a run, oldest first."""
    return sorted(
        path.parent
        for path in output_dir.glob(f"{CHECKPOINTS}/step_*/{STATE_FILE}")
        if re.fullmatch(r"step_\d+", path.parent.name)
    )


def _read(path: Path) -> dict:
    try:
        state = json.loads(path.read_text())
        missing = {"world_size", "ema", "identity"} - set(state)
    except (ValueError, TypeError) as error:
        raise UserError(f"--resume: {path} is broken ({error}). Use an earlier restart point.") from None
    if missing:
        raise UserError(f"--resume: {path} lacks {', '.join(sorted(missing))}. Use an earlier restart point.")
    return state
