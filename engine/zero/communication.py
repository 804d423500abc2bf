"""Starts the process group through DeepSpeed, so that ZeRO and `engine.distributed` share it; reads hostfiles.

On CPUs DeepSpeed has each rank make a buffer file of 69 MB in /dev/shm for the sums of its tensor-parallel layers, and
never removes it. This program has no such layers, so no buffers are made here, and those of dead processes are removed.
"""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import TorchBackend

from engine import distributed
from engine.errors import UserError
from engine.host_memory import keep_freed_memory
from engine.zero.accelerator import ranks_of_this_machine

_BACKEND = sys.modules[TorchBackend.__module__]  # `deepspeed.comm.torch`, as which that package shows torch itself

SHARED_MEMORY = Path("/dev/shm")
BUFFERS = "deepspeed_allreduce_buffer"  # the start of the files' names; the user's number, address, port, rank follow


def init(timeout_minutes: float = 30.0) -> torch.device:
    """Join the process group (NCCL on GPUs, gloo on CPUs), once, and return the device of this rank.

    timeout_minutes: how long a collective call may wait, in all process groups. Raises: UserError on a rank that does
    not see its GPU.
    """
    if not distributed.is_initialized():
        defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        accelerator = get_accelerator()
        on_cpu = accelerator.device_name() == "cpu"
        if not on_cpu:
            _check_gpu(accelerator.device_count())
            accelerator.set_device(distributed.local_rank())
        else:
            if "OMP_NUM_THREADS" not in os.environ:
                # Ranks of one node share its cores; each of them taking all makes everything many times slower.
                torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_of_this_machine()))
            keep_freed_memory()
        if distributed.local_rank() == 0:
            clear_dead_buffers()
        longest = timedelta(minutes=timeout_minutes)
        distributed.let_groups_wait(longest)
        with without_buffers():
            deepspeed.init_distributed(
                dist_backend="gloo" if on_cpu else accelerator.communication_backend_name(),
                auto_mpi_discovery=False,
                verbose=False,
                timeout=longest,
            )
        if on_cpu:
            backend = deepspeed.comm.comm.cdb  # what ZeRO gathers weights and sums gradients with
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
    """The processes that the launcher starts on each host of a hostfile, in its order.

    Raises: OSError, ValueError for a file that the launcher would not read.
    """
    from deepspeed.launcher.runner import fetch_hostfile

    return dict(fetch_hostfile(path))


@contextlib.contextmanager
def without_buffers() -> Iterator[None]:
    """Within this context `deepspeed.init_distributed` makes no buffer files; it reduces through the process group."""
    build = _BACKEND.build_shm_op
    _BACKEND.build_shm_op = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _BACKEND.build_shm_op = build  # type: ignore[attr-defined]


def clear_dead_buffers(folder: Path = SHARED_MEMORY, pattern: str = f"{BUFFERS}_{os.getuid()}_*") -> list[str]:
    """Remove this user's buffers of dead processes; returns their names. pattern: pattern of the files' names.

    A process has its buffer open from its creation to the end of the process. So a buffer that no process has open is
    that of a dead process.
    """
    removed = []
    for path in sorted(folder.glob(pattern)):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and not _in_use(path):
                path.unlink()
                removed.append(path.name)
    return removed


def _in_use(path: Path) -> bool:
    """Whether any process has the file open or mapped; True if the system cannot tell.

    The kernel gives a write lease only on a file that nobody else has open. /proc does not suffice: it does not show
    processes of other containers that share this folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        # Whoever opens the file meanwhile would have this process sent SIGIO, which ends it; SIGURG is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
