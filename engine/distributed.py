"""Processes and what they tell each other; the only file that names torch.distributed and deepspeed.comm.

Everything works unchanged with one process and no launcher: the calls then return their argument.
"""

import contextlib
import ctypes
import fcntl
import io
import os
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def rank() -> int:
    """This process's number, 0-based; 0 without a launcher."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of processes; 1 without a launcher."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def rank_share(total: int, of: tuple[int, int] | None = None) -> slice:
    """Which of `total` items, numbered over all ranks, are this rank's: one piece, and the pieces follow the ranks.

    Equal pieces where the number of ranks divides `total`; otherwise their sizes differ by at most one.
    of: (rank, number of ranks), by default this process's.
    """
    number, ranks = of or (rank(), world_size())
    return slice(total * number // ranks, total * (number + 1) // ranks)


def is_main() -> bool:
    """Whether this is the process that prints and writes what is written once."""
    return rank() == 0


def local_rank() -> int:
    """This process's number on its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def init(timeout_minutes: float = 30.0) -> torch.device:
    """Join the process group (NCCL on GPUs, gloo on CPUs), once, and return the device of this rank."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if not dist.is_initialized():
        defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            accelerator.set_device(local_rank())
        elif "OMP_NUM_THREADS" not in os.environ:
            # Ranks of one node share its cores; each of them taking all makes everything many times slower.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_SIZE", world_size()))))
        if accelerator.device_name() == "cpu":
            _keep_memory()
            load_extension("ShareMemCommBuilder")  # which gloo's ranks reduce through
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints which extension it has loaded
            deepspeed.init_distributed(
                dist_backend=accelerator.communication_backend_name() if accelerator.device_name() != "cpu" else "gloo",
                auto_mpi_discovery=False,
                verbose=False,
                timeout=timedelta(minutes=timeout_minutes),
            )
        if accelerator.device_name() == "cpu":
            comm = deepspeed.comm.comm.cdb  # what ZeRO gathers weights and sums gradients with
            comm.all_gather_function, comm.reduce_scatter_function = _gather_by_broadcasts, _scatter_by_all_reduce
    return device()


def _keep_memory() -> None:
    """Have the C library keep freed memory for the next tensor, as torch does on GPUs.

    Otherwise each large tensor is new memory from the system, whose pages are cleared one by one as they are written:
    a twentieth of a forward pass, and more of a backward pass.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def load_extension(builder: str) -> None:
    """Build (once) or load an extension of DeepSpeed's, one process of this machine at a time.

    torch marks a build by a file, which a killed process leaves behind for everyone to wait for. The lock taken here
    goes with its process, so a mark found while it is held is such a leftover.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    if sys.prefix != sys.base_prefix:  # the build belongs to this environment's DeepSpeed; others would build it anew
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    with (root / "four_engine_rlhf.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for mark in root.glob("**/lock"):
            mark.unlink(missing_ok=True)
        found = get_accelerator().create_op_builder(builder)
        if found is not None and found.is_compatible():
            if not any(root.glob(f"**/{found.NAME}*.so")):
                print(f"building DeepSpeed's extension {found.NAME}, once; this takes about a minute", flush=True)
            found.load()


def device() -> torch.device:
    """The device that this rank computes on."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def natural_dtype() -> str:
    """What this machine trains in best: "bf16" on GPUs that have it, "fp16" on others, "fp32" on CPUs."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return "fp32"
    if accelerator.device_name() == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if accelerator.is_bf16_supported() else "fp16"


def free_memory() -> int:
    """Bytes that this rank may still take: of its GPU, or its share of the host's."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_SIZE", world_size()))


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over all ranks, in a new tensor."""
    return _all_reduce(tensor, dist.ReduceOp.SUM)


def all_reduce_max(tensor: torch.Tensor) -> torch.Tensor:
    """The elementwise maximum of `tensor` over all ranks, in a new tensor."""
    return _all_reduce(tensor, dist.ReduceOp.MAX)


def _all_reduce(tensor: torch.Tensor, op) -> torch.Tensor:
    result = tensor.detach().clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(result, op=op)
    return result


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's `tensor` (N,), of equal sizes, as (ranks, N)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor.unsqueeze(0)
    gathered = tensor.new_empty(dist.get_world_size() * len(tensor))
    if dist.get_backend() == "gloo":
        _gather_by_broadcasts(gathered, tensor)
    else:  # the function's name from torch 2.13 on, or before
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, tensor)
    return gathered.view(dist.get_world_size(), -1)


class _Works(list):
    """Collective calls under way, as one."""

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self:
            work.wait()


def _gather_by_broadcasts(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group=None, async_op: bool = False
) -> _Works | None:
    """torch.distributed.all_gather_into_tensor for gloo, which broadcasts large tensors four times as fast as it
    gathers them."""
    parts = output_tensor.view(-1).chunk(dist.get_world_size(group))
    parts[dist.get_rank(group)].copy_(input_tensor.view(-1))
    senders = range(len(parts)) if group is None else dist.get_process_group_ranks(group)
    works = _Works(dist.broadcast(part, sender, group=group, async_op=True) for part, sender in zip(parts, senders))
    return works if async_op else works.wait()


def _scatter_by_all_reduce(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, op=dist.ReduceOp.SUM, group=None, async_op: bool = False
) -> None:
    """torch.distributed.reduce_scatter_tensor for gloo, which is faster at reducing all of a large tensor in place than
    at sorting out its parts. `input_tensor` is overwritten; ZeRO-3 gives a buffer that it has no other use for."""
    assert not async_op, "ZeRO-3 reduces gradients synchronously on CPUs"
    dist.all_reduce(input_tensor, op=op, group=group)
    own = input_tensor.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)]
    if own.data_ptr() != output_tensor.data_ptr():
        output_tensor.view(-1).copy_(own)


def largest(number: int) -> int:
    """The largest of all ranks' numbers."""
    return number if world_size() == 1 else int(all_reduce_max(torch.tensor(number, device=device())).item())


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on at least one rank."""
    if world_size() == 1:
        return bool(flag)
    return bool(all_reduce_max(torch.tensor([float(flag)], device=device())).item())


def all_gather_objects(value) -> list:
    """The picklable `value` of every rank, in rank order, on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value):
    """Rank 0's picklable `value`, on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def barrier() -> None:
    """Wait until all ranks are here."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
