"""Collective calls in two stages: among nodes, then among the ranks of each.

A call over all ranks at once sends the same numbers to a node more than once, where its algorithm goes by ranks alone:
gloo's trees cross between two nodes of two ranks ten times a gather of four parts, where four times would do; NCCL's
rings enter each of N nodes of G ranks with all but 1 / (N G) of the numbers, and leave 1 / N of them there before.
Here ranks of one place gather across nodes, each a G-th of what their node lacks, and then share within the node.
"""

from torch import Tensor

from engine import distributed
from engine.distributed import RankGroup, Work
from engine.zero.accelerator import ranks_of_this_machine

WHAT = ("gathers", "all", "nothing")
"""What can be done by node. Gathers: not a bit changes. All: sums of gradients too, where we take them (gloo), which
change by rounding since they are taken in another order."""

_what = "gathers"
_of_the_run: "Gathers | None" = None


def begin(what: str = "gathers") -> None:
    """Say what is done by node from now on, one of WHAT (all ranks call this, when they have joined their group)."""
    global _what, _of_the_run
    assert what in WHAT, what
    _what = what
    _of_the_run = Gathers()


def gathers() -> "Gathers":
    """Those that everything uses which has none apart."""
    return _of_the_run or Gathers()


class Gathers:
    """All-gathers over all ranks, by node where there are several nodes with equally many ranks, more than one.

    All ranks make it together, and its calls. Its process groups are its own, unless there is one stage: then it is the
    run's, or with `apart` one of its own, too, for calls beside those of others.
    """

    def __init__(self, apart: bool = False):
        self.nodes, self.node_size = 1, _ranks_of_a_node() if _what != "nothing" else None
        self._world = RankGroup(distributed.world_size()) if apart and self.node_size is None else None
        if self.node_size is not None:
            self.nodes = distributed.world_size() // self.node_size
            self._within = RankGroup(self.node_size)
            self._across = RankGroup(self.nodes, stride=self.node_size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor (N,), of equal sizes, as (ranks, N)."""
        if distributed.world_size() == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(distributed.world_size() * len(tensor))
        self.gather_into(gathered, tensor)
        return gathered.view(distributed.world_size(), -1)

    def gather_into(self, output: Tensor, own: Tensor, async_op: bool = False) -> Work | None:
        """Put the ranks' tensors, of one number of elements n, one behind the other into `output` (ranks * n,)."""
        if self.node_size is None:
            gather = distributed.gather_into if self._world is None else self._world.gather_into
            return gather(output, own, async_op=async_op)
        column = own.new_empty(self.nodes * own.numel())
        first = self._across.gather_into(column, own.view(-1), async_op=async_op)
        second = _Within(self._within, output.view(self.nodes, -1), column.view(self.nodes, -1), first)
        if async_op:
            return second
        second.wait()
        return None

    def reduce_scatter_into(self, output: Tensor, parts: Tensor) -> None:
        """Fill `output` (n,) with the sum over ranks of what they have for this one, the rank-th n of `parts`, which is
        overwritten. Only by node."""
        assert self.node_size is not None
        self._within.sum_(parts)
        columns = parts.view(self.nodes, self.node_size, -1)[:, self._within.place].contiguous()
        self._across.sum_scattered(output.view(-1), columns)

    def needs(self, numbers: int) -> int:
        """How many numbers a gather takes for a while beside what is sent, so many, and what is received."""
        return numbers * self.nodes if self.node_size is not None else 0


class _Within:
    """The second stage of a gather, which is made when the first one is waited for."""

    def __init__(self, group: RankGroup, outputs: Tensor, columns: Tensor, first: Work | None):
        self.group, self.outputs, self.columns, self.first = group, outputs, columns, first

    def wait(self) -> None:
        """Wait for both stages."""
        if self.first is not None:
            self.first.wait()
        for output, own in zip(self.outputs, self.columns, strict=True):
            self.group.gather_into(output, own)


def zero_gather(output_tensor: Tensor, input_tensor: Tensor, group=None, async_op: bool = False) -> Work | None:
    """torch.distributed.all_gather_into_tensor for gloo, as DeepSpeed calls it, by node where all ranks take part."""
    if not distributed.is_world(group):
        return distributed.gather_by_broadcasts(output_tensor, input_tensor, group, async_op)
    return gathers().gather_into(output_tensor, input_tensor, async_op)


def zero_reduce_scatter(output_tensor: Tensor, input_tensor: Tensor, *args, **kwargs) -> None:
    """torch.distributed.reduce_scatter_tensor for gloo, as DeepSpeed calls it."""
    if _what != "all" or not distributed.is_world(kwargs.get("group")) or gathers().node_size is None:
        distributed.scatter_by_all_reduce(output_tensor, input_tensor, *args, **kwargs)
        return
    gathers().reduce_scatter_into(output_tensor, input_tensor)


def _ranks_of_a_node() -> int | None:
    """How many ranks each node has, if there are several nodes, and several ranks on each, in order (all ranks call
    this)."""
    size = ranks_of_this_machine()
    if size == distributed.world_size():
        return None
    fits = 1 < size < distributed.world_size() and distributed.world_size() % size == 0
    fits = fits and distributed.rank() % size == distributed.local_rank()
    return size if len(set(distributed.all_gather_objects(size if fits else None))) == 1 and fits else None
