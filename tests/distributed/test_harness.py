"""The harness brings back every rank's result, and the reason when one fails or none ends."""

import pytest

from scripts.harness.ranks import run_ranks


def test_results_come_in_rank_order():
    assert run_ranks("tests.distributed.work_harness:numbered", world=2, value=3) == [(0, 2, 7.0), (1, 2, 7.0)]


def test_a_failing_rank_is_shown_and_the_waiting_one_ended():
    with pytest.raises(RuntimeError, match="(?s)one_rank_fails: failed on rank .*a number that nobody expected"):
        run_ranks("tests.distributed.work_harness:one_rank_fails", world=2)


def test_ranks_that_do_not_end_are_ended():
    with pytest.raises(RuntimeError, match="not done after 1 s"):
        run_ranks("tests.distributed.work_harness:does_not_end", world=2, timeout=1.0)
