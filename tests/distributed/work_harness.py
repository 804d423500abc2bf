"""Run by ranks: what the harness has to bring back, or to survive."""

import time

import torch

from engine import distributed


def numbered(value: int) -> tuple[int, int, float]:
    """This rank, the number of ranks, and a sum over all ranks."""
    total = distributed.all_reduce_sum(torch.tensor(float(value + distributed.rank())))
    return distributed.rank(), distributed.world_size(), total.item()


def one_rank_fails() -> None:
    """The last rank raises; the others wait for it."""
    if distributed.rank() == distributed.world_size() - 1:
        raise ValueError("a number that nobody expected")
    distributed.barrier()


def does_not_end() -> None:
    """Nobody says what the ranks wait for."""
    time.sleep(600)
