"""What tensors take by phase: bytes that were worked out by hand."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from training.reporting import phase_memory
from training.reporting.phase_memory import AtRest, GpuPeak, PhaseMemory, tensor_bytes
from training.reporting.step_metrics import StepLog, peak_memory_gb


def test_each_storage_counts_once_gradients_included():
    before = tensor_bytes()
    layer = nn.Linear(100, 50, bias=False)  # 20,000 bytes
    layer(torch.ones(2, 100)).sum().backward()  # and as many of gradients, which no Python object holds
    view, other = layer.weight.detach().view(-1)[:10], torch.zeros(30, dtype=torch.int64)
    away, sparse = torch.empty(1000, device="meta"), torch.eye(3).to_sparse()
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(7), static_shapes=False)
    assert tensor_bytes() - before == 2 * 20_000 + 240
    assert len(view) and len(other) and away.is_meta and sparse.is_sparse and fake.dim() == 1
    del layer
    assert tensor_bytes() - before == 20_000 + 240  # the view holds the weights; the gradients are gone
    del view, other
    assert tensor_bytes() == before


def test_a_phase_has_what_is_held_at_its_end():
    memory, kept = PhaseMemory(AtRest()), {}
    with memory.phase("before"):
        kept["before"] = torch.zeros(1000)
    assert memory.bytes == {}  # nothing is counted until it is asked for
    memory.counting, start = True, tensor_bytes()
    with memory.phase("load"):
        kept["weights"] = torch.zeros(2500)
        assert torch.zeros(100_000).sum() == 0  # gone by the end
    with memory.phase("train"):
        kept["moments"] = torch.zeros(5000)
    with memory.phase("train"):
        del kept["weights"]
    assert {name: count - start for name, count in memory.bytes.items()} == {"load": 10_000, "train": 20_000}


def test_the_phases_of_a_step_are_counted(monkeypatch):
    memory = PhaseMemory(AtRest())
    monkeypatch.setattr("training.reporting.step_metrics.phase_memory", memory)
    memory.counting, log = True, StepLog()
    with log.phase("generate"):
        held = torch.zeros(250)
    with log.phase("train"):
        del held
    assert memory.bytes["generate"] - memory.bytes["train"] == 1000


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
    gpu, memory = Allocator(monkeypatch), PhaseMemory(GpuPeak())
    monkeypatch.setattr("training.reporting.step_metrics.phase_memory", memory)
    monkeypatch.setattr("training.reporting.step_metrics.on_gpu", lambda: True)
    memory.counting = True
    with memory.phase("load"):
        gpu.take(9_000_000_000)
        gpu.take(-8_000_000_000)
    with memory.phase("generate"):
        gpu.take(500_000_000)
    assert memory.bytes == {"load": 9_000_000_000, "generate": 1_500_000_000}
    assert peak_memory_gb() == 9.0  # of the whole run, though the count began anew
    memory.counting = False
    gpu.take(10_000_000_000)
    assert peak_memory_gb() == 11.5


@pytest.mark.parametrize("gpu, gauge", [(True, GpuPeak), (False, AtRest)])
def test_the_device_says_what_counts(gpu, gauge, monkeypatch):
    monkeypatch.setattr(phase_memory, "on_gpu", lambda: gpu)
    assert type(PhaseMemory().gauge) is gauge
