"""Ranks and their communication. No other file uses torch.distributed.

Everything also works in a single process without a launcher; collective calls then return their argument.
`engine.zero.communication.init` starts the process group.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from engine.zero.accelerator import device


def is_initialized() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_initialized()


def join_by_gloo(timeout: timedelta) -> None:
    """Join a process group of gloo, which also serves several ranks on one GPU. timeout: as for `let_groups_wait`."""
    dist.init_process_group("gloo", timeout=timeout)


def rank() -> int:
    """The number of this process, counted from 0; 0 without a launcher. Under ZeRO this number decides which part of
    the weights this process has. `data_parallel_rank` decides which part of the data it has."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of processes; 1 without a launcher."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def data_parallel_rank() -> int:
    """The number of this process's part of the data, counted from 0. Prompts, samples and texts are divided and counted
    by parts of the data, not by processes. At present each process has a part of its own."""
    return rank()


def data_parallel_size() -> int:
    """The number of parts into which the data are divided."""
    return world_size()


def data_parallel_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor with the sum of `tensor` over all parts of the data. tensor: a tensor that was computed from this
    process's part of the data."""
    return all_reduce_sum(tensor)


def data_parallel_objects(value) -> list:
    """Returns, on all ranks, a list of the picklable `value` of every part of the data, in the order of the parts."""
    return all_gather_objects(value)


def rank_share(total: int, of: tuple[int, int] | None = None) -> slice:
    """The slice of `total` items that belongs to this rank. Slices are contiguous and in the order of the ranks.

    Slices are equal if the number of ranks divides `total`; otherwise their sizes differ by at most one.
    of: (rank, number of ranks); by default (`data_parallel_rank`, `data_parallel_size`).
    """
    number, ranks = of or (data_parallel_rank(), data_parallel_size())
    return slice(total * number // ranks, total * (number + 1) // ranks)


def is_main() -> bool:
    """Whether this process is the main rank, which prints, and writes the files that only one process writes."""
    return rank() == 0


def local_rank() -> int:
    """The number of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor with the sum of `tensor` over all ranks."""
    return _all_reduce(tensor, dist.ReduceOp.SUM)


def all_reduce_max(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor with the elementwise maximum of `tensor` over all ranks."""
    return _all_reduce(tensor, dist.ReduceOp.MAX)


def _all_reduce(tensor: torch.Tensor, op) -> torch.Tensor:
    result = tensor.detach().clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(result, op=op)
    return result


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """Stacks the tensors (N,) of all ranks, which must have equal sizes; returns (ranks, N)."""
    if world_size() == 1:
        return tensor.unsqueeze(0)
    gathered = tensor.new_empty(world_size(), len(tensor))
    if dist.get_backend() == "gloo":
        gather_by_broadcasts(gathered, tensor)
    else:  # the function's name from torch 2.13 on, and its name before
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered.view(-1), tensor)
    return gathered


class _Works(list):
    """Several pending collective calls, for which a caller can wait as if they were one."""

    def wait(self) -> None:
        """Wait for all calls."""
        for work in self:
            work.wait()


def gather_by_broadcasts(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group=None, async_op: bool = False
) -> _Works | None:
    """As torch.distributed.all_gather_into_tensor, but implemented with broadcasts, with which gloo is four times as
    fast for large tensors."""
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
    """As torch.distributed.reduce_scatter_tensor, but implemented with an all-reduce, with which gloo is faster for
    large tensors. `input_tensor` is overwritten; ZeRO-3 passes a buffer that it does not use again."""
    assert not async_op, "ZeRO-3 reduces gradients synchronously on CPUs"
    dist.all_reduce(input_tensor, op=op, group=group)
    own = input_tensor.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)]
    if own.data_ptr() != output_tensor.data_ptr():
        output_tensor.view(-1).copy_(own)


def largest(number: int | torch.Tensor) -> int:
    """The largest of all ranks' numbers, as an int. number: an int, or a tensor () int64; with a tensor the host waits
    for the device only once."""
    if world_size() > 1:
        number = all_reduce_max(torch.as_tensor(number, device=device()))
    return int(number)


def any_rank(flag: bool | torch.Tensor) -> bool:
    """Whether `flag`, bool or () bool, is true on at least one rank."""
    return bool(largest(flag.long() if isinstance(flag, torch.Tensor) else int(flag)))


def all_gather_objects(value) -> list:
    """Returns, on all ranks, a list of the picklable `value` of every rank, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value):
    """Returns the picklable `value` of rank 0 on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


class RankGroup:
    """This rank's group of ranks. All ranks are divided into groups of `size` neighbouring ranks.

    place: this rank's number within the group.

    Args:
        size: the number of ranks in a group, which must divide the number of all ranks. All ranks create their groups
            together.
    """

    def __init__(self, size: int):
        self.size, self.place, self._group = size, 0, None
        if size > 1:
            assert world_size() % size == 0, f"{world_size()} ranks cannot be divided into groups of {size}"
            self.place = rank() % size
            groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size(), size)]
            self._group = groups[rank() // size]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `tensor` over the group. A contiguous `tensor` is overwritten with the sum."""
        if self.size > 1:
            tensor = tensor.contiguous()
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the tensors (..., n) of the group's ranks along the last dimension; returns (..., size * n). All
        tensors must have the same shape."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, -1)

    def all_to_all(self, tensor: torch.Tensor, given: list[int], taken: list[int]) -> torch.Tensor:
        """Divides a tensor (sum(given), ...) among the group's ranks along its first dimension, and returns what this
        rank gets of all ranks' tensors: (sum(taken), ...), in the order of the ranks. Gradients go back the same way,
        so all ranks also make the backward pass together.

        given, taken: the length of the part that goes to each rank, and of the part that comes from it.
        """
        return _AllToAll.apply(tensor, given, taken, self) if self.size > 1 else tensor

    def all_to_all_single(self, tensor: torch.Tensor, given: list[int], taken: list[int]) -> torch.Tensor:
        """As `all_to_all`, without gradients."""
        arrived = tensor.new_empty(sum(taken), *tensor.shape[1:])
        dist.all_to_all_single(arrived, tensor.contiguous(), taken, given, group=self._group)
        return arrived

    def all_objects(self, value) -> list:
        """A list of the picklable `value` of every rank of the group, in the order of the ranks."""
        gathered = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered


class _AllToAll(torch.autograd.Function):
    """`RankGroup.all_to_all`: in the backward pass the gradients are exchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, given: list[int], taken: list[int], group: RankGroup) -> torch.Tensor:
        ctx.exchange = given, taken, group
        return group.all_to_all_single(tensor, given, taken)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        given, taken, group = ctx.exchange
        return group.all_to_all_single(gradient, taken, given), None, None, None


ALONE = RankGroup(1)
"""The group of this rank and no other."""


def barrier() -> None:
    """Wait until all ranks have called this."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


@contextlib.contextmanager
def waiting(longest: timedelta) -> Iterator[None]:
    """A context in which one rank may be busy for up to `longest`. The other ranks wait for it at the end of the
    context (all ranks enter it together).

    A barrier would not do, because it would time out after the group's timeout, which is meant for a training step.
    """
    many = dist.is_initialized() and dist.get_world_size() > 1
    group = dist.new_group(backend="gloo", timeout=longest) if many else None
    yield
    if group is not None:
        dist.barrier(group=group)
        dist.destroy_process_group(group)


STORE_ANSWERS = timedelta(seconds=45)
"""The longest wait for an answer of the store. Many ranks may ask at the same time, and torch looks up the name of each
address that it connects to: where no name server answers, that takes up to 30 s (resolv.conf's timeout and attempts).
"""


def key_value_store(host: str, port: int, serve: bool = False) -> dist.Store:
    """The store through which processes find each other before the process group exists.

    serve: whether this process holds the store.
    Raises: RuntimeError if no process holds the store.
    """
    return dist.TCPStore(host, port, is_master=serve, timeout=STORE_ANSWERS, wait_for_workers=False, multi_tenant=serve)


def let_groups_wait(longest: timedelta) -> None:
    """Set the timeout of all process groups that are created from now on, by DeepSpeed, `RankGroup` or a device mesh.
    torch has no setting for this: a group that is created without a timeout gets torch's default (10 minutes with NCCL,
    30 with gloo), whatever timeout the first process group has."""
    distributed_c10d._get_default_timeout = lambda backend: longest


def shutdown() -> None:
    """Leave the process group, if this process has joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()
