"""What tensors take of a GPU by phase: bytes that were worked out by hand."""

import torch

from training.reporting.step_metrics import PhaseMemory, StepLog, peak_memory_gb


class Allocator:
    """A GPU's allocator, as far as it is asked."""

    def __init__(self, monkeypatch):
        self.held = self.peak = 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(self, "peak", self.held))

    def take(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)


def test_on_a_gpu_each_phase_has_its_own_peak_and_the_run_the_largest(monkeypatch):
    gpu, memory = Allocator(monkeypatch), PhaseMemory()
    monkeypatch.setattr("training.reporting.step_metrics.on_gpu", lambda: True)
    monkeypatch.setattr("training.reporting.step_metrics.phase_memory", memory)
    monkeypatch.setattr("training.reporting.step_metrics.on_gpu", lambda: True)
    with memory.phase("before"):
        gpu.take(1000)
        gpu.take(-1000)
    assert memory.bytes == {}  # nothing is counted until it is asked for
    memory.counting, log = True, StepLog()
    with memory.phase("load"):
        gpu.take(9_000_000_000)
        gpu.take(-8_000_000_000)
    with log.phase("generate"):
        gpu.take(500_000_000)
    assert memory.bytes == {"load": 9_000_000_000, "generate": 1_500_000_000}
    assert peak_memory_gb() == 9.0  # of the whole run, though the count began anew
    memory.counting = False
    gpu.take(10_000_000_000)
    assert peak_memory_gb() == 11.5
