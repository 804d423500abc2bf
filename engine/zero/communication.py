"""The process group and its hosts; started with DeepSpeed so that ZeRO and `engine.distributed` share it."""

import os
from datetime import timedelta

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from engine import distributed
from engine.host_memory import keep_freed_memory
from engine.zero.accelerator import ranks_of_this_machine
from engine.zero.shared_memory import clear_dead_buffers, without_buffers


def init(timeout_minutes: float = 30.0) -> torch.device:
    """Join the process group (NCCL on GPUs, gloo on CPUs), once, and return the device of this rank."""
    if not distributed.is_initialized():
        defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        accelerator = get_accelerator()
        on_cpu = accelerator.device_name() == "cpu"
        if not on_cpu:
            accelerator.set_device(distributed.local_rank())
        else:
            if "OMP_NUM_THREADS" not in os.environ:
                # Ranks of one node share its cores; each of them taking all makes everything many times slower.
                torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_of_this_machine()))
            keep_freed_memory()
        if distributed.local_rank() == 0:
            clear_dead_buffers()
        with without_buffers():
            deepspeed.init_distributed(
                dist_backend="gloo" if on_cpu else accelerator.communication_backend_name(),
                auto_mpi_discovery=False,
                verbose=False,
                timeout=timedelta(minutes=timeout_minutes),
            )
        if on_cpu:
            backend = deepspeed.comm.comm.cdb  # what ZeRO gathers weights and sums gradients with
            backend.all_gather_function = distributed.gather_by_broadcasts
            backend.reduce_scatter_function = distributed.scatter_by_all_reduce
    return distributed.device()


def slots_by_host(path: str) -> dict[str, int]:
    """The processes that the launcher starts on each host of a hostfile, in its order.

    Raises: OSError, ValueError for a file that the launcher would not read.
    """
    from deepspeed.launcher.runner import fetch_hostfile

    return dict(fetch_hostfile(path))
