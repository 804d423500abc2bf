"""Seconds and bytes: what scripts/benchmark_step3.py and its parts measure with."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine import distributed
from engine.zero.accelerator import on_gpu


def now() -> float:
    """Seconds of wall-clock time, with the device's queue emptied."""
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(call: Callable) -> tuple[float, object]:
    """Seconds that a call takes from when all ranks are there to when the last has done it, and its result."""
    distributed.barrier()
    started = now()
    result = call()
    return slowest(now() - started), result


def slowest(value: float) -> float:
    """The largest value of all ranks."""
    return distributed.all_reduce_max(torch.tensor(value, dtype=torch.float64, device=distributed.device())).item()


def reset_peak_memory() -> None:
    """Begin to look for the most memory anew."""
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # some containers forbid it: the peak is then that since the process began
            Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def peak_memory() -> int:
    """The most bytes held since: of the GPU if there is one, else of the process."""
    if on_gpu():
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
