"""The harness brings back every rank's result, and the reason when one fails or none ends."""

import time

import pytest
import torch

from engine import distributed
from scripts.harness.ranks import run_ranks


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


def test_results_come_in_rank_order():
    assert run_ranks("tests.distributed.test_harness:numbered", world=2, value=3) == [(0, 2, 7.0), (1, 2, 7.0)]


def test_a_failing_rank_is_shown_and_the_waiting_one_ended():
    with pytest.raises(RuntimeError, match="(?s)one_rank_fails: failed on rank .*a number that nobody expected"):
        run_ranks("tests.distributed.test_harness:one_rank_fails", world=2)


def test_ranks_that_do_not_end_are_ended():
    with pytest.raises(RuntimeError, match="not done after 1 s"):
        run_ranks("tests.distributed.test_harness:does_not_end", world=2, timeout=1.0)
