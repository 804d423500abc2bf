"""The planner's part in a run: the memory table of a dry run, and a line that compares the plan with the first step."""

import sys
from typing import Any

from tqdm import tqdm

from engine import distributed
from engine.zero.accelerator import on_gpu
from training.config.step3 import RLHFFlags
from training.reporting.step_metrics import phase_memory
from training.runtime.callbacks import Callback


class Compared(Callback):
    """Prints the memory table in a dry run. On GPUs it prints the memory that tensors take in each phase of step 3's
    first step, beside the planned one. A run that plans nothing imports none of the planner."""

    def __init__(self):
        self._planned: dict[str, int] | None = None

    def planned(self, args: Any, plan: Any) -> None:
        """In a dry run print the table; otherwise begin to measure."""
        if args.dry_run:
            from training.tools.memory.here import memory_lines

            print(*memory_lines(args), sep="\n")
        elif isinstance(args, RLHFFlags) and distributed.is_main() and on_gpu():
            from training.tools.memory.here import planned_phases

            self._planned = planned_phases(args)
            phase_memory.counting = True

    def after_step(self, report: Any) -> None:
        """After the first step, print what was measured."""
        if self._planned is None:
            return
        phase_memory.counting = False
        tqdm.write(measured_line(phase_memory.bytes, self._planned), file=sys.stderr)
        self._planned = None


def measured_line(measured: dict[str, int], planned: dict[str, int]) -> str:
    """A line with the GB of each phase, in brackets as planned."""
    parts = [
        f"{phase} {size / 1e9:.1f}" + (f" ({planned[phase] / 1e9:.1f})" if phase in planned else "")
        for phase, size in measured.items()
    ]
    return f"memory, GB of rank 0 at each phase's peak (planned): {', '.join(parts)}"
