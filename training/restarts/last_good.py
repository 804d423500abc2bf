"""Which restart point a run that stopped may be gone on from: one that is written now, one that is there, or none."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.errors import RunStopped
from training.restarts.checkpoints import Checkpoints
from training.restarts.layout import MANIFEST, points_in, step_of


@contextlib.contextmanager
def last_good_named(checkpoints: Checkpoints, weights_of: Callable[[], int | None]) -> Iterator[None]:
    """Within this context a RunStopped, which all ranks raise together, comes to name a restart point.

    Where the weights are sound and those of a finished step, their restart point is written, if it is not there.
    Otherwise the newest sound one is named, or that there is none.

    weights_of: () -> the step after which the weights are what they are; None in the middle of an update.
    """
    try:
        yield
    except RunStopped as stop:
        if stop.good_until is None:
            raise
        step = weights_of() if stop.good_until == math.inf else None
        saved = checkpoints.save(step, wait=True) if step else None
        checkpoints.wait()
        if saved is not None:
            ending = f"The state after step {step} is saved: go on from it with --resume {saved}."
        else:
            ending = last_good(checkpoints.output_dir, stop.good_until)
        raise RunStopped(f"{stop}\n{ending}") from None


def last_good(output_dir: Path, good_until: float) -> str:
    """A sentence on the newest restart point of at most this step, and on those after it."""
    steps = {step_of(point) or 0: point for point in points_in(output_dir) if (point / MANIFEST).is_file()}
    good = [step for step in steps if step <= good_until]
    spoilt = [steps[step].name for step in sorted(steps) if step > good_until]
    later = f" {', '.join(spoilt)} came after it: do not go on from there." if spoilt else ""
    if not good:
        return f"There is no restart point of a sound step in {output_dir}: --save_steps N writes them.{later}"
    point = steps[max(good)]
    return f"The last good restart point is {point}: go on from it with --resume {point}.{later}"
