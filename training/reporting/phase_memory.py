"""The most that tensors take of this rank's GPU in each phase of a run, to stand beside what was planned.

    with phase_memory.phase("train"):
        ...
    phase_memory.bytes["train"]

What torch's allocator counts, without what it holds in reserve. A CPU's counts no peaks: there nothing is counted.
"""

import contextlib
from collections.abc import Iterator

import torch

from engine.zero.accelerator import on_gpu


class PhaseMemory:
    """Peaks by phase, as long as it is `counting`; of a phase that comes again, the latest.

    The allocator's count begins anew with each phase: `most` is over all of them.
    """

    def __init__(self):
        self.bytes: dict[str, int] = {}
        self.counting = False
        self._most = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's peak."""
        if not self.counting:
            yield
            return
        self.begin()
        yield
        self.bytes[name] = self.end()

    def begin(self) -> None:
        """Count from here on; on CPUs nothing happens."""
        if on_gpu():
            self.end()
            torch.cuda.reset_peak_memory_stats()

    def end(self) -> int:
        """The peak since `begin`."""
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        self._most = max(self._most, peak)
        return peak

    def most(self) -> int:
        """The most that tensors have taken in this process."""
        return max(self._most, torch.cuda.max_memory_allocated())


phase_memory = PhaseMemory()
"""This process's."""
