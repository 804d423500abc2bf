"""The order in which examples, prompts and blocks of text are visited. The order depends on the seed only.

    order = PromptOrder(len(prompts), batch_size=64, seed=0)
    indices, visits = order.batch(step)

The permutation of an epoch is drawn from (seed, epoch). Checkpoints need not store it: a run that is resumed at step n,
on any number of ranks, goes on with batch n. The feeds (`ShuffledPrompts`, `ShuffledTexts`) give each rank its share of
a step's prompts and blocks of text.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine import distributed
from engine.errors import UserError
from engine.experience import PromptBatch
from training.data.examples import Prompts, TextBlocks, collate_prompts


def epoch_permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """(size,) int64, the order in which epoch `epoch` visits 0 .. size - 1."""
    return np.random.default_rng((seed, epoch)).permutation(size)


class PromptOrder:
    """The order in which step 3 visits prompts: epoch after epoch without end. A batch may contain the end of one epoch
    and the beginning of the next."""

    def __init__(self, size: int, batch_size: int, seed: int):
        if batch_size > size:
            raise UserError(
                f"a batch of {batch_size} prompts is asked for, and there are {size}; lower the batch size "
                "or add prompts."
            )
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}  # of the last batch's epochs, since drawing takes time

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(indices, visits) of batch `step`, counted from 0, over all ranks; both (batch_size,) int64.

        indices: the numbers of the batch's prompts. visits: how often each of these prompts was visited before, which
        is the number of its epoch, counted from 0.
        """
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        visits, places = np.divmod(positions, self.size)
        self._orders = {epoch: self._order(epoch) for epoch in np.unique(visits).tolist()}
        indices = [int(self._orders[epoch][place]) for epoch, place in zip(visits.tolist(), places.tolist())]
        return torch.tensor(indices), torch.tensor(visits)

    def _order(self, epoch: int) -> np.ndarray:
        kept = self._orders.get(epoch)
        return _small(epoch_permutation(self.size, self.seed, epoch)) if kept is None else kept


def _small(order: np.ndarray) -> np.ndarray:
    """The same numbers as int32 if they fit, to save memory: each rank holds a number for each example."""
    return order.astype(np.int32) if len(order) < 2**31 else order


class EpochBatches(Sequence):
    """This rank's batches of one epoch. Each batch is a list of indices, which is made when it is asked for."""

    def __init__(self, order: np.ndarray, global_size: int, end: int, rank: int, world: int):
        self._order = _small(order)
        self._size = global_size
        self._rank = (rank, world)
        self._starts = range(0, end, global_size)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        start = self._starts[index]
        batch = self._order[start : start + self._size]
        return batch[distributed.rank_share(len(batch), of=self._rank)].tolist()


def epoch_batches(
    size: int, batch_size: int, epoch: int, seed: int, rank: int, world: int, drop_last: bool = True
) -> EpochBatches:
    """This rank's batches in one epoch of step 1 or 2, as lists of indices.

    The epoch's permutation is divided into global batches of batch_size * world indices. Each rank takes its
    `rank_share` of each global batch. Therefore the examples of an optimizer step do not depend on the number of ranks,
    as long as batch_size * world is the same. All ranks have the same number of batches. With drop_last=False the last
    batch may be short, and empty on some ranks; the caller then uses a dummy batch with weight 0.

    size: number of examples. batch_size: number of examples in a batch of one rank. world: number of ranks.
    """
    global_size = batch_size * world
    if drop_last and size < global_size:
        raise UserError(
            f"{size} examples are fewer than one batch of {batch_size} on each rank, of {world}; lower the batch size "
            "or add data."
        )
    end = size - size % global_size if drop_last else size
    return EpochBatches(epoch_permutation(size, seed, epoch), global_size, end, rank, world)


class ShuffledPrompts:
    """Gives this rank's prompts in shuffled order, in batches of `per_rank` prompts."""

    def __init__(self, prompts: Prompts, *, per_rank: int, seed: int, pad_token_id: int):
        self.data, self.pad_token_id = prompts, pad_token_id
        self.order = PromptOrder(len(prompts), per_rank * distributed.data_parallel_size(), seed)

    def prompts(self, batch: int) -> PromptBatch:
        """The batch of prompts with this number, counted from 0."""
        own = distributed.rank_share(self.order.batch_size)
        indices, visits = (column[own] for column in self.order.batch(batch))
        return collate_prompts([self.data[index] for index in indices.tolist()], indices, visits, self.pad_token_id)


class ShuffledTexts:
    """Gives this rank's blocks of text in shuffled order, `per_rank` blocks for each optimizer step."""

    def __init__(self, blocks: TextBlocks, *, per_rank: int, seed: int):
        self.blocks, self.order = blocks, PromptOrder(len(blocks), per_rank * distributed.data_parallel_size(), seed)

    def texts(self, optimizer_step: int) -> Tensor:
        """(B, L) int64: this rank's blocks of text for an optimizer step, whose number is counted from 0."""
        indices, _ = self.order.batch(optimizer_step)
        own = distributed.rank_share(self.order.batch_size)
        return torch.tensor([self.blocks[index] for index in indices[own].tolist()])
