"""Starts the process group through DeepSpeed, so that ZeRO and `engine.distributed` share one group. Also reads
hostfiles.

On CPUs DeepSpeed has each rank create a buffer file of 69 MB in /dev/shm, for the sums of DeepSpeed's tensor-parallel
layers, and never removes it. This program does not use those layers, and therefore creates no buffers.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import TorchBackend

from engine import distributed
from engine.errors import UserError
from engine.host_memory import keep_freed_memory
from engine.zero.accelerator import ranks_of_this_machine

_BACKEND = sys.modules[TorchBackend.__module__]  # the module deepspeed/comm/torch.py; the attribute is torch itself


def init(timeout_minutes: float = 30.0, share_gpus: bool = False) -> torch.device:
    """Join the process group (NCCL on GPUs, gloo on CPUs), unless this process has joined it already; returns the
    device of this rank.

    timeout_minutes: the longest time that a collective call may wait, in all process groups. share_gpus: whether the
    ranks of a machine with fewer GPUs share these. They join by gloo, because NCCL refuses two ranks on one GPU.
    Raises: UserError on a rank that does not see its GPU.
    """
    if not distributed.is_initialized():
        defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        accelerator = get_accelerator()
        on_cpu = accelerator.device_name() == "cpu"
        shared = share_gpus and not on_cpu and accelerator.device_count() < ranks_of_this_machine()
        if shared:
            os.environ["LOCAL_RANK"] = str(distributed.local_rank() % accelerator.device_count())
        if not on_cpu:
            _check_gpu(accelerator.device_count())
            accelerator.set_device(distributed.local_rank())
        else:
            if "OMP_NUM_THREADS" not in os.environ:
                # The ranks of a node share its cores. If each rank used all cores, everything would be many times
                # slower.
                torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_of_this_machine()))
            keep_freed_memory()
        name = "gloo" if on_cpu or shared else accelerator.communication_backend_name()
        longest = timedelta(minutes=timeout_minutes)
        distributed.let_groups_wait(longest)
        if shared:  # DeepSpeed takes this group; its own would be bound to the GPU, which is for NCCL
            distributed.join_by_gloo(longest)
        with without_buffers():
            deepspeed.init_distributed(
                dist_backend=name,
                auto_mpi_discovery=False,
                verbose=False,
                timeout=longest,
            )
        if name == "gloo":
            backend = deepspeed.comm.comm.cdb  # ZeRO gathers weights and sums gradients with it
            backend.all_gather_function = distributed.gather_by_broadcasts
            backend.reduce_scatter_function = distributed.scatter_by_all_reduce
    return distributed.device()


def _check_gpu(seen: int) -> None:
    if distributed.local_rank() >= seen:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UserError(
            f"rank {distributed.rank()} has LOCAL_RANK {distributed.local_rank()} and sees {seen} "
            f"GPU{'' if seen == 1 else 's'}{f' (CUDA_VISIBLE_DEVICES={visible})' if visible is not None else ''}: each "
            "rank takes the GPU of its LOCAL_RANK, counted from 0. Start as many processes as the node has GPUs, and "
            "have each of them see all of these (srun without --gpus-per-task and --gpu-bind)."
        )


def slots_by_host(path: str) -> dict[str, int]:
    """{host: the number of processes that the launcher starts on it}, in the order of the hostfile.

    Raises: OSError or ValueError if the launcher could not read the file.
    """
    from deepspeed.launcher.runner import fetch_hostfile

    return dict(fetch_hostfile(path))


@contextlib.contextmanager
def without_buffers() -> Iterator[None]:
    """Within this context `deepspeed.init_distributed` creates no buffer files; reductions use the process group."""
    build = _BACKEND.build_shm_op
    _BACKEND.build_shm_op = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _BACKEND.build_shm_op = build  # type: ignore[attr-defined]
