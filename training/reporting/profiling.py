"""Recordings of single steps by torch.profiler: one file a rank and step, in the format of Chrome's traces.

    profiler = Profiler([3, 4], output_dir, say=print)
    with profiler.record(step=3):                # writes output_dir/profile/step_000003_rank0.json.gz; nothing for 5
        trainer.step(prompts)

ui.perfetto.dev opens such a file. Within the phases, which `StepLog` names, the passes of each model are ranges of
their own: what is to be one bears `engine.trace.traced`, which does nothing while no step is recorded.
Shapes, memory and Python's stacks are left out, since they make a file many times as large.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from engine import distributed
from engine.zero.accelerator import on_gpu
from training.runtime.unwritten import going_on

PROFILE = "profile"  # the folder in the output folder


class Profiler:
    """Records some steps of a run.

    steps: their numbers, from 1. say: called on each rank with a line on what has been written.
    """

    def __init__(self, steps: Sequence[int], output_dir: Path, say: Callable[[str], None]):
        self.steps, self.folder, self.say = frozenset(steps), output_dir / PROFILE, say

    @contextlib.contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Record what happens in this context if `step` is one of those asked for; a step that raises leaves none."""
        if step not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu()
        with torch.profiler.profile(activities=activities) as profile:
            yield
        with going_on(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"step_{step:06d}_rank{distributed.rank()}.json.gz"
            path.unlink(missing_ok=True)  # a link would be written through
            profile.export_chrome_trace(str(path))
        self.say(
            f"step {step} recorded: {self.folder}/step_{step:06d}_rank*.json.gz, one file a rank. Open one in "
            "https://ui.perfetto.dev (it stays in your browser) or chrome://tracing."
        )


def set_aside_newer(output_dir: Path, step: int) -> None:
    """Rename this rank's recordings of steps after `step` to *.abandoned, as restart points are: they show a course
    that the run has left, and its own recordings take their names."""
    for file in (output_dir / PROFILE).glob(f"step_*_rank{distributed.rank()}.json.gz"):
        if int(file.name.split("_")[1]) > step:
            file.replace(file.with_name(file.name + ".abandoned"))
