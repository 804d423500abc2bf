"""What a step takes: seconds by phase, and memory."""

import contextlib
import resource
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.profiler import record_function

from engine import distributed
from engine.zero.accelerator import on_gpu
from training.program import phases
from training.reporting.metrics import Accumulator
from training.reporting.phase_memory import phase_memory


class PhaseClock:
    """Seconds of wall-clock time by phase, with the device's queue emptied at both ends.

    In a trace phases are ranges, for the watch over the run they are its places, and `phase_memory` counts them.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with phase_memory.phase(phase), record_function(phase), phases.phase(phase):
            started = self._now()
            yield
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - started

    @staticmethod
    def _now() -> float:
        if on_gpu():
            torch.cuda.synchronize()
        return time.perf_counter()

    def add_to(self, metrics: Accumulator, tokens: Tensor) -> None:
        """Put the slowest rank's times, and the tokens generated per second over all ranks, into the metrics."""
        for phase, seconds in self.seconds.items():
            metrics.add_max(f"time/{phase}", seconds)
        metrics.add_max("time/step", sum(self.seconds.values()))
        metrics.add("rollout/tokens_per_second", tokens * distributed.world_size(), self.seconds["generate"])


def peak_memory_gb() -> float:
    """The most memory this process has held, in 10^9 bytes: of the GPU if there is one, else of the host."""
    if on_gpu():
        return phase_memory.most() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
