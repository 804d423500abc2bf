"""What the first step took of memory, beside what was planned for it: a line in the run's output."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from engine import distributed
from engine.algorithms import Dialect
from engine.errors import UserError
from engine.memory import MemoryPlan
from engine.memory.table import gb
from engine.rollout import ROLLOUT_BACKENDS
from engine.zero.accelerator import on_gpu
from training.flags.rlhf_arguments import RLHFFlags
from training.program.memory_lines import setting_here
from training.reporting.phase_memory import phase_memory

PHASES = {"generate": "generate", "make_experience": "experience", "train": "train"}
"""The plan's names of a step's phases."""


@contextlib.contextmanager
def memory_compared(args: RLHFFlags, dialect: Dialect, resumed: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Count the phases of the step within on the main rank, and say a line of planned and measured bytes after it.

    resumed: whether Adam has its moments before the step. Nothing in the planning can end the run.
    """
    if not distributed.is_main():
        yield
        return
    phase_memory.counting = True
    try:
        yield
    finally:
        phase_memory.counting = False
    say(comparison(args, phase_memory.bytes, lambda: setting_here(args, dialect).planned(), resumed))


def comparison(args: RLHFFlags, measured: dict[str, int], make: Callable[[], MemoryPlan], resumed: bool) -> str:
    """The line: GB of a rank, of a GPU each phase's peak; of a CPU, which counts none, what is held after the step.

    measured: bytes by the step's phases.
    """
    counted = {PHASES[name]: size for name, size in measured.items() if name in PHASES}
    where = "at each phase's peak" if on_gpu() else "of tensors after the first step (a CPU counts no peaks)"
    if not on_gpu():
        counted = {phase: size for phase, size in counted.items() if phase == "train"}
    try:
        if ROLLOUT_BACKENDS[args.rollout_backend] is not None:
            raise UserError(f"--rollout_backend {args.rollout_backend} is your own")
        with torch.random.fork_rng(devices=[]):  # the run draws as it would without
            planned = _planned_bytes(make(), resumed)
    except Exception as error:  # whatever it is, the run has what it needs
        why = " ".join(str(error).split()) or type(error).__name__
        return f"memory, measured GB of rank 0 {where}: {_listed(counted, {})}; not planned: {why}"
    beyond = "; --reward_function's own is in what is measured alone" if args.reward_function else ""
    return f"memory, planned / measured GB of rank 0 {where}: {_listed(counted, planned)}{beyond}"


def _planned_bytes(plan: MemoryPlan, resumed: bool) -> dict[str, int]:
    """What the first step should take, by phase; before it trains Adam has no moments, unless they were restored."""
    if not on_gpu():
        return {"train": plan.between}
    later = 0 if resumed else plan.adam
    return {
        phase: plan.peak_of(phase).device.total - (0 if phase == "train" else later)
        for phase in plan.names
        if phase in PHASES.values()
    }


def _listed(measured: dict[str, int], planned: dict[str, int]) -> str:
    def figures(phase: str) -> str:
        return f"{gb(planned[phase])} / {gb(measured[phase])}" if planned else gb(measured[phase])

    return ", ".join(f"{phase} {figures(phase)}" if on_gpu() else figures(phase) for phase in measured)
