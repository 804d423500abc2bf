"""Which restart point a run that stopped may be gone on from: one that is there, or that there is none."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.errors import RunStopped
from training.restarts.resume_point import restart_points


@contextlib.contextmanager
def last_good_named(output_dir: str | Path) -> Iterator[None]:
    """Within this context a RunStopped after which the weights are in doubt names the newest sound restart point."""
    try:
        yield
    except RunStopped as stop:
        if stop.good_until is None:
            raise
        raise RunStopped(f"{stop}\n{last_good(output_dir, stop.good_until)}") from None


def last_good(output_dir: str | Path, good_until: float) -> str:
    """A sentence on the newest restart point of at most this step, and on those after it."""
    steps = {int(point.name.removeprefix("step_")): point for point in restart_points(Path(output_dir))}
    good = [step for step in steps if step <= good_until]
    spoilt = [steps[step].name for step in sorted(steps) if step > good_until]
    later = f" {', '.join(spoilt)} came after it: do not go on from there." if spoilt else ""
    if not good:
        return f"There is no restart point of a sound step in {output_dir}: --save_steps N writes them.{later}"
    point = steps[max(good)]
    return f"The last good restart point is {point}: go on from it with --resume {point}.{later}"
