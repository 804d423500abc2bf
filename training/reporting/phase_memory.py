"""What a rank's tensors take in each phase of a run, counted, to stand beside what was planned.

    with phase_memory.phase("load"):
        models = RLHFEngine.from_pretrained(spec)
    phase_memory.bytes["load"]

Storages are counted, not the process: a process also holds libraries, and memory that it has not given back.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from engine.zero.accelerator import on_gpu


class Gauge(Protocol):
    """Counts the bytes of one phase after the other."""

    peaks: bool
    """Whether it counts the most that was held within a phase, and not what is held at its end."""

    def begin(self) -> None:
        """A phase begins."""

    def end(self) -> int:
        """A phase has ended: its bytes."""


class GpuPeak:
    """The most that tensors took on this rank's GPU at once, by the count of torch's allocator.

    Its count begins anew with each phase: `most` is over all phases.
    """

    peaks = True

    def __init__(self):
        self.most = 0

    def begin(self) -> None:
        """Count from here on."""
        torch.cuda.synchronize()
        self.most = max(self.most, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    def end(self) -> int:
        """The peak since `begin`."""
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        self.most = max(self.most, peak)
        return peak


class AtRest:
    """What tensors hold when a phase has ended. A CPU's allocator counts no peaks, and to look at each operation would
    make the step several times as long."""

    peaks = False

    def begin(self) -> None:
        """Nothing: what is held at the end counts."""

    def end(self) -> int:
        """Bytes of all storages that are alive."""
        return tensor_bytes()


class PhaseMemory:
    """Bytes by phase, as long as it is `counting`; of a phase that comes again, the latest."""

    def __init__(self, gauge: Gauge | None = None):
        self._gauge = gauge
        self.bytes: dict[str, int] = {}
        self.counting = False

    @property
    def gauge(self) -> Gauge:
        """What it counts with; the device is asked for once it is known."""
        if self._gauge is None:
            self._gauge = GpuPeak() if on_gpu() else AtRest()
        return self._gauge

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's bytes."""
        if not self.counting:
            yield
            return
        self.gauge.begin()
        yield
        self.bytes[name] = self.gauge.end()

    def most(self) -> int:
        """The most that a GPU's tensors have taken in this process: its own count begins anew with each phase."""
        return max(getattr(self._gauge, "most", 0), torch.cuda.max_memory_allocated())


phase_memory = PhaseMemory()
"""This process's."""


def tensor_bytes() -> int:
    """Bytes of the storages of all tensors that Python can reach, gradients included, each storage once.

    Tensors without memory (on the meta device, and torch's fake ones, which compilers leave behind) and sparse ones
    are left out.
    """
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if not issubclass(type(found), Tensor):
            continue
        for tensor in (found, found.grad if found.is_leaf else None):
            if tensor is None or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage.device.type != "meta":
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
