"""Threads of Adam in host memory: DeepSpeed's extension itself, on two ranks of a node of eight cores."""

import os
from pathlib import Path
from unittest import mock

import torch

from engine.zero.extensions import offloaded_adamw
from scripts.harness.ranks import run_ranks


def threads_of_a_step() -> tuple[int, float]:
    """(threads that a step has begun, what it has made of a weight of 1), as torchrun starts a rank."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    weight = torch.nn.Parameter(torch.ones(1 << 20))
    weight.grad = torch.ones_like(weight)
    with mock.patch.object(os, "sched_getaffinity", lambda _: set(range(8))):
        adam = offloaded_adamw([{"params": [weight]}], lr=0.25)
    before = len(list(Path("/proc/self/task").iterdir()))
    adam.step()
    return len(list(Path("/proc/self/task").iterdir())) - before, weight[0].item()


def test_two_ranks_of_eight_cores_take_four_each():
    for begun, weight in run_ranks("tests.distributed.test_threads:threads_of_a_step", timeout=1800):
        assert begun == 3  # beside the one that calls
        assert weight == 0.75
