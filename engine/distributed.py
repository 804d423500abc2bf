"""Ranks and their communication; the only file that uses torch.distributed.

Everything also works with one process and no launcher: the calls then return their argument. The process group itself
is started by `engine.zero.communication.init`.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from engine.zero.accelerator import device


def is_initialized() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_initialized()


def rank() -> int:
    """This process's number, 0-based; 0 without a launcher. Under ZeRO the processes divide the weights.
    `data_parallel_rank` is the number of this process's part of the data."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of processes; 1 without a launcher."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def data_parallel_rank() -> int:
    """The number of this process's part of the data, 0-based. Prompts, samples and texts are divided and counted by
    these parts, not by processes; at present each process has a part of its own."""
    return rank()


def data_parallel_size() -> int:
    """The number of parts into which the data are divided."""
    return world_size()


def data_parallel_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor`, which was computed from a part of the data, over all parts, in a new tensor."""
    return all_reduce_sum(tensor)


def data_parallel_objects(value) -> list:
    """The picklable `value` of every part of the data, in the order of the parts, on all ranks."""
    return all_gather_objects(value)


def ranks_in_words() -> str:
    """How many processes there are: "1 rank", "8 ranks"."""
    count = world_size()
    return f"{count} rank" if count == 1 else f"{count} ranks"


def rank_share(total: int, of: tuple[int, int] | None = None) -> slice:
    """The slice of `total` items that is this rank's. Slices are contiguous and in the order of the ranks.

    Slices are equal if the number of ranks divides `total`; otherwise their sizes differ by at most one.
    of: (rank, number of ranks), by default those of the data.
    """
    number, ranks = of or (data_parallel_rank(), data_parallel_size())
    return slice(total * number // ranks, total * (number + 1) // ranks)


def is_main() -> bool:
    """Whether this is the main rank, which prints, and writes the files that are written once."""
    return rank() == 0


def local_rank() -> int:
    """This process's number on its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


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
    """Every rank's tensor (N,), of equal sizes, as (ranks, N)."""
    if world_size() == 1:
        return tensor.unsqueeze(0)
    gathered = tensor.new_empty(world_size(), len(tensor))
    if dist.get_backend() == "gloo":
        gather_by_broadcasts(gathered, tensor)
    else:  # the function's name from torch 2.13 on, or before
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered.view(-1), tensor)
    return gathered


class _Works(list):
    """Several pending collective calls as one."""

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self:
            work.wait()


def gather_by_broadcasts(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group=None, async_op: bool = False
) -> _Works | None:
    """torch.distributed.all_gather_into_tensor, made of broadcasts: for large tensors gloo is four times as fast with
    these."""
    parts = output_tensor.view(-1).chunk(dist.get_world_size(group))
    parts[dist.get_rank(group)].copy_(input_tensor.view(-1))
    senders = range(len(parts)) if group is None else dist.get_process_group_ranks(group)
    works = _Works(dist.broadcast(part, sender, group=group, async_op=True) for part, sender in zip(parts, senders))
    if async_op:
        return works
    works.wait()
    return None


def scatter_by_all_reduce(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, op=dist.ReduceOp.SUM, group=None, async_op: bool = False
) -> None:
    """torch.distributed.reduce_scatter_tensor, made of an all-reduce: for large tensors gloo is faster with it.
    `input_tensor` is overwritten; ZeRO-3 passes a buffer that it does not use again."""
    assert not async_op, "ZeRO-3 reduces gradients synchronously on CPUs"
    dist.all_reduce(input_tensor, op=op, group=group)
    own = input_tensor.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)]
    if own.data_ptr() != output_tensor.data_ptr():
        output_tensor.view(-1).copy_(own)


def largest(number: int | torch.Tensor) -> int:
    """The largest of all ranks' numbers, as int. number: int, or a tensor () int64; then the host waits for the device
    only once."""
    if world_size() > 1:
        number = all_reduce_max(torch.as_tensor(number, device=device()))
    return int(number)


def any_rank(flag: bool | torch.Tensor) -> bool:
    """Whether `flag`, bool or () bool, is true on at least one rank."""
    return bool(largest(flag.long() if isinstance(flag, torch.Tensor) else int(flag)))


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


class RankGroup:
    """This rank's group of ranks. All ranks are divided into groups of `size` neighbouring ranks.

    place: this rank's number within the group.

    Args:
        size: must divide the number of ranks. All ranks create their groups together.
    """

    def __init__(self, size: int):
        assert world_size() % size == 0, f"{world_size()} ranks cannot be divided into groups of {size}"
        self.size, self.place = size, rank() % size
        self._group = None
        if size > 1:
            groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size(), size)]
            self._group = groups[rank() // size]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, overwritten with its sum over the group."""
        if self.size > 1:
            tensor = tensor.contiguous()
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors (..., n) of the group's ranks, all of one shape, joined along the last dimension: (..., size *
        n)."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, -1)

    def all_objects(self, value) -> list:
        """The picklable `value` of every rank of the group, in their order."""
        gathered = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered


def barrier() -> None:
    """Wait until all ranks have called this."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


@contextlib.contextmanager
def waiting(longest: timedelta) -> Iterator[None]:
    """A context in which one rank may be busy for up to `longest`; the others wait for it at the end (all ranks call
    this).

    A barrier would time out after the group's timeout, which is chosen for a training step.
    """
    many = dist.is_initialized() and dist.get_world_size() > 1
    group = dist.new_group(backend="gloo", timeout=longest) if many else None
    yield
    if group is not None:
        dist.barrier(group=group)
        dist.destroy_process_group(group)


def key_value_store(host: str, port: int, serve: bool = False, seconds: float = 5.0) -> dist.Store:
    """The store through which processes find each other before there is a process group.

    serve: whether this process holds the store. seconds: timeout for an answer; many ranks that ask at once wait for
    one another.
    Raises: RuntimeError if no process serves it.
    """
    wait = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, is_master=serve, timeout=wait, wait_for_workers=False, multi_tenant=serve)


def let_groups_wait(longest: timedelta) -> None:
    """Set the timeout of all process groups that are created from now on, by DeepSpeed, `RankGroup` or a device mesh.
    torch has no setting for this: a group without a timeout gets torch's constants (10 minutes with NCCL, 30 with
    gloo), whatever the timeout of the world's group is."""
    distributed_c10d._get_default_timeout = lambda backend: longest


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
