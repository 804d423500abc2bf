"""The restart point that a run goes on from, and the others that stand beside it."""

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine import distributed
from engine.errors import UserError
from engine.json_objects import parsed
from engine.whole_files import remove_folder
from training.program.agreement import SharedError, checked
from training.restarts.conditions import Conditions
from training.restarts.layout import AUTO, STATE_FILE, holds_point, points_in, set_aside, step_of, unfinished_in
from training.restarts.manifest import damages

STATE_FIELDS = {"steps_done": int, "models": dict, "ema": bool, "identity": dict, "settings": dict}
SHOWN = 3  # damaged files that a message names


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A restart point, found once in a run, seen to be whole, and handed on.

    folder: .../checkpoints/step_N. state: what its state file holds; training/restarts/conditions.py says what that is.
    in_output_dir: whether its run stands in this run's --output_dir, where the curves then go on. passed_over: a line
    for each newer point that is damaged.
    """

    folder: Path
    state: dict
    in_output_dir: bool = False
    passed_over: tuple[str, ...] = ()

    @classmethod
    def find(cls, path: str | None, output_dir: str, with_ema: bool = False) -> "ResumePoint | None":
        """The restart point that --resume names (all ranks call this); None where there is nothing to go on from.

        Every file of a point is hashed before it is taken. In a run's output folder a damaged point is passed over for
        the one before it.

        Args:
            path: a restart point's folder, the output folder of a run, or "auto": the newest point in `output_dir`, and
                none where that has none.
            output_dir: where the run that goes on writes.
            with_ema: whether it keeps a moving average.

        Raises: UserError on all ranks if there is none, if the one that is named, or all of them, are damaged, or if it
            has an average and the run has none.
        """
        if path is None:
            return None
        by_name, folders = checked(lambda: _candidates(path, output_dir))
        passed_over: list[str] = []
        for folder in folders:
            found = damages(folder)
            if not found:
                state = checked(partial(_read, folder / STATE_FILE, with_ema))
                in_output_dir = folder.resolve().parent.parent == Path(output_dir).resolve()
                return cls(folder, state, in_output_dir, tuple(passed_over))
            passed_over.append(f"the restart point {folder} is damaged: {_shortened(found)}")
            if by_name:
                older = _newest_whole_before(folder)
                instead = f"Give the older one, {older}" if older else "There is no older whole one beside it"
                raise SharedError(f"--resume: {passed_over[0]}. {instead}.")
        if path == AUTO and not passed_over:
            return None
        raise SharedError(f"--resume {path}: {'; '.join(passed_over)}. There is no other one: begin anew.")

    @property
    def steps_done(self) -> int:
        """How many steps had been trained when it was written."""
        return self.state["steps_done"]

    def lines(self) -> list[str]:
        """What the run says of where it goes on from."""
        return [
            *(f"PASSED OVER: {line}" for line in self.passed_over),
            f"goes on from {self.folder}, after step {self.steps_done}",
        ]

    def check(self, conditions: Conditions, last_step: int) -> None:
        """Raise UserError if a run under these conditions, up to this step, cannot go on from here."""
        conditions.check(Conditions.read(self.state), self.folder)
        if self.steps_done > last_step:
            raise UserError(
                f"--resume {self.folder}: it stands at step {self.steps_done}, behind the run's last "
                f"step {last_step}. Raise --max_steps or --num_train_epochs."
            )


def _candidates(path: str, output_dir: str) -> tuple[bool, list[Path]]:
    """Whether `path` names a restart point itself, and the folders to be tried, the best first."""
    if path == AUTO:
        return False, points_in(Path(output_dir))[::-1]
    folder = Path(path)
    if folder.is_dir() and (step_of(folder) is not None or holds_point(folder)):
        return True, [folder]
    points = points_in(folder)[::-1]
    if not points:
        raise UserError(
            f"--resume {path}: no restart point there. Give a folder .../checkpoints/step_N, or the output folder of a "
            "run that wrote some (--save_steps)."
        )
    return False, points


def _newest_whole_before(damaged: Path) -> Path | None:
    step, output_dir = step_of(damaged), damaged.resolve().parent.parent
    if step is None:
        return None
    older = checked(lambda: [point for point in points_in(output_dir) if (step_of(point) or 0) < step])
    return next((point for point in reversed(older) if not damages(point)), None)


def _shortened(found: list[str]) -> str:
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def _read(path: Path, with_ema: bool) -> dict:
    """The state file of a whole point."""
    try:
        state = parsed(path.read_text())
        missing = [name for name, kind in STATE_FIELDS.items() if not isinstance(state.get(name), kind)]
    except (ValueError, AttributeError, OSError) as error:
        raise UserError(f"--resume: {path} is broken ({error}). Use an earlier restart point.") from None
    if missing:
        raise UserError(f"--resume: {path} has no {', '.join(missing)}. Use an earlier restart point.")
    if state["ema"] and not with_ema:
        raise UserError(
            f"--resume {path.parent}: it has a moving average, which would be lost. Give --enable_ema, as when the "
            "run began."
        )
    return state


def set_aside_newer(output_dir: Path, step: int) -> None:
    """Rename the restart points after `step` to step_N.abandoned (rank 0 does): a run that goes on from an older point
    takes another course, and the next --resume must not find the course it left.

    What a kill has left half written or half deleted is removed.
    """
    if distributed.is_main():
        for folder in unfinished_in(output_dir):
            with contextlib.suppress(OSError):
                remove_folder(folder)
        for point in points_in(output_dir):
            if (step_of(point) or 0) > step:
                set_aside(point)
    distributed.barrier()
