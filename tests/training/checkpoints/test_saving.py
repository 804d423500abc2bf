"""The copy in host memory from which a checkpoint is written: one buffer, allocated once, pinned for GPUs, and none
where memory has no room for it.
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch

from tests.engine.meters import LiveBytes
from tests.training.checkpoints.tiny_checkpoints import TinyModel, TinyRun
from training.checkpoints import saving
from training.checkpoints.files import ShardFiles, checkpoint_folder


def matrix(run: TinyRun, step: int) -> list:
    return ShardFiles(checkpoint_folder(run.checkpoints.output_dir, step) / "actor").whole("weights/matrix").tolist()


def allocated(run: TinyRun) -> LiveBytes:
    """Bytes beside the model's."""
    return LiveBytes(known=(run.model.matrix, run.model.vector))


def test_later_checkpoints_allocate_nothing(tmp_path):
    """Runs of 8, 16 and 8 bytes, each at a multiple of 64."""
    run = TinyRun(tmp_path, steps=1)
    with allocated(run) as meter:
        run.train_to(1)
        assert (meter.live, meter.peak) == (3 * 64, 3 * 64)
        run.train_to(3)
        assert (meter.live, meter.peak) == (3 * 64, 3 * 64)
    assert matrix(run, 2) == [[2.0] * 3] * 2 and matrix(run, 3) == [[3.0] * 3] * 2


@pytest.fixture
def free(monkeypatch):
    """A function that sets the number of free bytes of this machine, on which two ranks run."""
    monkeypatch.setenv("LOCAL_SIZE", "2")
    return lambda size: monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size))


@pytest.mark.parametrize("room", [True, False])
def test_training_waits_where_memory_has_no_room_for_a_copy(tmp_path, free, room):
    free(2 * 192 / 0.9 + (1 if room else -1))
    run = TinyRun(tmp_path, steps=1)
    with allocated(run) as meter:
        run.train_to(1)
    assert meter.peak == (192 if room else 0)
    waits = "step 1: training waits for its checkpoint, as host memory has no room for a copy of it"
    assert (waits in run.said) != room and ("training waited" in run.said[-1]) == room
    assert matrix(run, 1) == [[1.0] * 3] * 2


def test_a_copy_that_the_system_refuses_is_not_made(tmp_path, monkeypatch):
    empty = torch.empty

    def refuse(*sizes, **kwargs):
        if sizes == (192,):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*sizes, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    run = TinyRun(tmp_path, steps=1)
    run.train_to(1)
    assert "no room for a copy" in run.said[0] and matrix(run, 1) == [[1.0] * 3] * 2


def test_a_checkpoint_that_is_waited_for_is_written_without_a_copy(tmp_path):
    run = TinyRun(tmp_path, steps=1)
    with allocated(run) as meter:
        run.checkpoints.save(1, wait=True)
    assert meter.peak == 0 and matrix(run, 1) == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("code", [0, 2])  # cudaSuccess, cudaErrorMemoryAllocation
def test_what_is_copied_from_a_gpu_is_pinned_as_it_is(monkeypatch, code):
    """The buffer, of no other size; a buffer that a larger one replaces is not pinned any more."""
    called = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *given: called.append(("register", *given)) or code,
        cudaHostUnregister=lambda *given: called.append(("unregister", *given)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    ones = mock.Mock(side_effect=RuntimeError("CUDA error: out of memory"))  # of the registration
    monkeypatch.setattr(torch, "ones", ones)
    there = [replace(shard, values=shard.values.as_subclass(OnGPU)) for shard in TinyModel().shards()]
    shards = {"actor": there}
    copy = saving.HostCopy()
    assert copy.of(shards) and copy.of(shards)
    first = ("register", copy.buffer.data_ptr(), 192, 0)
    assert called == [first] and ones.call_count == (code != 0)
    assert [shard.values.tolist() for shard in copy.of(shards)["actor"]] == [[4, 5], [0, 1, 2, 3], [0] * 4]
    more = {"actor": there, "critic": there}
    assert copy.of(more) and len(copy.buffer) == 2 * 192
    assert called == [first, *[("unregister", first[1])] * (code == 0), ("register", copy.buffer.data_ptr(), 384, 0)]


def test_an_error_without_words_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "write_shards", mock.Mock(side_effect=MemoryError))
    run = TinyRun(tmp_path, steps=1)
    run.train_to(1)
    assert "rank 0: MemoryError." in run.said[-1]
