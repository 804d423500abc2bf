"""Processes and what they tell each other; the only file that names torch.distributed.

Everything works unchanged with one process and no launcher: the calls then return their argument. The process group
itself is started by `engine.zero.communication.init`.
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
    """This process's number, 0-based; 0 without a launcher."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of processes; 1 without a launcher."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def ranks_in_words() -> str:
    """How many processes there are: "1 rank", "8 ranks"."""
    count = world_size()
    return f"{count} rank" if count == 1 else f"{count} ranks"


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
    """Collective calls under way, as one."""

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self:
            work.wait()


def gather_by_broadcasts(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group=None, async_op: bool = False
) -> _Works | None:
    """torch.distributed.all_gather_into_tensor for gloo, which broadcasts large tensors four times as fast as it
    gathers them."""
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
    """torch.distributed.reduce_scatter_tensor for gloo, which is faster at reducing all of a large tensor in place than
    at sorting out its parts. `input_tensor` is overwritten; ZeRO-3 gives a buffer that it has no other use for."""
    assert not async_op, "ZeRO-3 reduces gradients synchronously on CPUs"
    dist.all_reduce(input_tensor, op=op, group=group)
    own = input_tensor.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)]
    if own.data_ptr() != output_tensor.data_ptr():
        output_tensor.view(-1).copy_(own)


def largest(number: int | torch.Tensor) -> int:
    """The largest of all ranks' numbers: int, or () int64, which the host then waits for once and not before."""
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
    """Ranks that do something together: this one's of the groups of `size` that the ranks are divided into.

    place: this rank's number within the group.

    Args:
        size: divides the number of ranks; neighbours are together. All ranks make their groups together.
    """

    def __init__(self, size: int):
        assert world_size() % size == 0, f"{world_size()} ranks cannot be divided into groups of {size}"
        self.size, self.place = size, rank() % size
        self._group = None
        if size > 1:
            groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size(), size)]
            self._group = groups[rank() // size]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, in place of which the sum over the group has come."""
        if self.size > 1:
            tensor = tensor.contiguous()
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors (..., n), of one shape, side by side: (..., size * n)."""
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
    """Wait until all ranks are here."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


@contextlib.contextmanager
def waiting(longest: timedelta) -> Iterator[None]:
    """A block in which one rank may be busy for so long; the others wait for it at its end (all ranks call this).

    A barrier would break off after the group's own time, which is that of a step.
    """
    many = dist.is_initialized() and dist.get_world_size() > 1
    group = dist.new_group(backend="gloo", timeout=longest) if many else None
    yield
    if group is not None:
        dist.barrier(group=group)
        dist.destroy_process_group(group)


def key_value_store(host: str, port: int, serve: bool = False, seconds: float = 5.0) -> dist.Store:
    """The store through which processes find each other before there is a group.

    serve: be the one that holds it. seconds: after which an answer does not come any more; many ranks that ask at once
    wait for one another.
    Raises: RuntimeError where nobody serves it.
    """
    wait = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, is_master=serve, timeout=wait, wait_for_workers=False, multi_tenant=serve)


def let_groups_wait(longest: timedelta) -> None:
    """Have the calls of all process groups that are made from now on wait for so long, whoever makes them: DeepSpeed,
    `RankGroup`, a device mesh. torch has no setting for it, and gives a group that is not told its own constants, 10
    minutes with NCCL and 30 with gloo, whatever the world's group was given."""
    distributed_c10d._get_default_timeout = lambda backend: longest


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
