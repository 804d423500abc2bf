"""Training states in memory: what all ranks' runs are together, and a source to read them from."""

import math

import torch
from torch import Tensor

from engine.zero.training_state import Shard


def whole(shards: list[Shard]) -> dict[str, Tensor]:
    """The full tensors that all ranks' runs make up, with copies of their numbers.

    Raises: AssertionError where a number comes twice or never, or ranks disagree about a tensor.
    """
    shapes, found = {}, {}
    for shard in shards:
        numbers, times = found.setdefault(
            shard.name,
            (torch.empty(math.prod(shard.shape), dtype=shard.values.dtype), torch.zeros(math.prod(shard.shape))),
        )
        assert shapes.setdefault(shard.name, shard.shape) == shard.shape and shard.values.dtype == numbers.dtype
        numbers[shard.start : shard.start + len(shard.values)] = shard.values.cpu()
        times[shard.start : shard.start + len(shard.values)] += 1
    for name, (_, times) in found.items():
        assert (times == 1).all(), f"{name}: numbers come {times.min():g} to {times.max():g} times"
    return {name: numbers.view(shapes[name]) for name, (numbers, _) in found.items()}


class InMemory:
    """Full tensors by name, as a `ShardSource`. `asked`: how many numbers were read of each."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors, self.asked = tensors, dict.fromkeys(tensors, 0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As of any source."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, start: int, out: Tensor) -> None:
        """As of any source."""
        out.copy_(self.tensors[name].view(-1)[start : start + len(out)])
        self.asked[name] += len(out)
