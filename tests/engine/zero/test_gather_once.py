"""What is kept whole over the passes of a step goes by the memory that is free."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine import distributed
from engine.zero import accelerator
from engine.zero.gather_once import Kept, TrainingGather, what_to_keep

NOTHING, WEIGHTS, BOTH = Kept(), Kept(weights=True), Kept(weights=True, gradients=True)


@pytest.mark.parametrize(
    "passes, free, kept",
    [
        # 14 GB of weights, 14 of gradients; room: 0.8 of what is free less a pass, or 0.4 of it
        (30, 73, BOTH),  # 58.4 - 30 = 28.4
        (30, 72, WEIGHTS),  # 57.6 - 30 = 27.6
        (30, 55, WEIGHTS),  # 44 - 30 = 14
        (30, 54, NOTHING),  # 43.2 - 30 = 13.2
        (None, 71, BOTH),  # 28.4
        (None, 69, WEIGHTS),  # 27.6
        (None, 34, NOTHING),  # 13.6
    ],
)
def test_as_much_as_fits(passes, free, kept):
    assert what_to_keep(14, 14, passes, free) == kept


@pytest.mark.parametrize("free, kept", [(1760, BOTH), (1740, WEIGHTS), (1240, NOTHING)])
def test_on_gpus_a_first_step_finds_what_passes_take(monkeypatch, capsys, free, kept):
    """100 numbers of weights, 400 bytes, and as many of gradients. Passes take 700 - 200 = 500 bytes on this rank, 600
    on another. Room: 0.8 * 1760 - 600 = 808, 0.8 * 1740 - 600 = 792, 0.8 * 1240 - 600 = 392."""
    parameter = nn.Parameter(torch.zeros(100))
    parameter.ds_id, parameter.ds_numel, parameter.ds_active_sub_modules = 0, 100, set()
    parameter.ds_status, parameter.ds_persist = None, False
    memory = SimpleNamespace(allocated=200, most=700)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "largest", lambda number: max(number, 600) if number > 0 else number)
    monkeypatch.setattr(accelerator, "on_gpu", lambda: True)
    monkeypatch.setattr(accelerator, "free_memory", lambda: free)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: memory.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: memory.most)
    emptied = []
    module = nn.Module()
    module.register_parameter("weight", parameter)
    batch = TrainingGather(module, "actor", lambda: emptied.append(1), torch.float32)
    with batch.gathered(3, first=True):
        assert batch.kept is None and not parameter.ds_active_sub_modules
    with batch.gathered(3, first=True):
        assert batch.kept == kept and bool(parameter.ds_active_sub_modules) == kept.weights
        ready = []
        for _ in range(3):
            batch.before_backward()
            ready.append(getattr(parameter, "ds_grad_is_ready", True))
    assert ready == ([False, False, True] if kept.gradients else [True] * 3)
    assert len(emptied) == kept.gradients and not parameter.ds_active_sub_modules
    assert "actor: weights are gathered" in capsys.readouterr().out


@pytest.mark.parametrize("sums, kept", [(torch.bfloat16, BOTH), (torch.float32, WEIGHTS)], ids=("bf16", "fp32"))
def test_gradients_are_not_added_up_on_a_rank_in_another_dtype_than_asked_for(monkeypatch, capsys, sums, kept):
    """data_types.grad_accum_dtype of a DeepSpeed JSON: on a rank they would be added up in the weights' bfloat16.
    There is room for both."""
    parameter = nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    parameter.ds_id, parameter.ds_numel, parameter.ds_active_sub_modules = 0, 100, set()
    parameter.ds_status, parameter.ds_persist = None, False
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(accelerator, "free_memory", lambda: 10**6)
    module = nn.Module()
    module.register_parameter("weight", parameter)
    batch = TrainingGather(module, "actor", lambda: None, sums)
    with batch.gathered(3, first=True):
        assert batch.kept == kept
    assert ("gradients are added up in float32" in capsys.readouterr().out) == (kept is WEIGHTS)
