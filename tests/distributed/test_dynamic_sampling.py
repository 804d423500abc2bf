"""Dynamic sampling on two ranks: the groups that are taken, resuming, and the run without it on the same prompts."""

import pytest
import torch

from scripts.harness.ranks import run_ranks
from tests.distributed.work_dynamic_sampling import MOST, PER_BATCH, SAVED_AFTER, STEPS, K, differs

RUNS = ("gae", "rloo")
OF_ALL_DRAWN = ("objective/scores", "objective/even", "objective/odd")


def straight_line() -> tuple[list[list[int]], list[int]]:
    """The prompts of each step, and how many batches have been drawn after it."""
    chosen: list[list[int]] = []
    drawn, counts = 0, []
    for _ in range(STEPS):
        kept: list[int] = []
        alike: list[int] = []
        batches = 0
        while len(kept) < PER_BATCH and batches < MOST:
            for index in range(drawn * PER_BATCH, (drawn + 1) * PER_BATCH):
                (kept if differs(index) else alike).append(index)
            drawn, batches = drawn + 1, batches + 1
        chosen.append((kept + alike)[:PER_BATCH])
        counts.append(drawn)
    return chosen, counts


CHOSEN, DRAWN = straight_line()


@pytest.fixture(scope="module")
def ranks(folder, output) -> list[dict]:
    return run_ranks("tests.distributed.work_dynamic_sampling:runs", folder=folder, output=output, chosen=CHOSEN)


def test_the_case_has_full_steps_one_that_is_filled_up_and_groups_that_move():
    assert CHOSEN == [[1, 2, 6, 7], [11, 12, 16, 17], [21, 22, 20, 23], [32, 36, 37, 41]] and DRAWN == [2, 5, 8, 11]


@pytest.mark.parametrize("run", RUNS)
def test_the_first_groups_with_a_difference_are_taken_and_lie_on_one_rank_each(ranks, run):
    for rank, found in enumerate(ranks):
        for step, report in enumerate(found[run]["whole"]["reports"]):
            own = CHOSEN[step][2 * rank : 2 * rank + 2]
            assert report["keys"] == [(index, sample) for index in own for sample in range(K)]
            assert report["samples"] == DRAWN[step] * PER_BATCH * K
            metrics = report["metrics"]
            before = DRAWN[step - 1] if step else 0
            assert metrics["rollout/batches_drawn"] == DRAWN[step] - before
            assert metrics["rollout/groups_drawn"] == PER_BATCH * (DRAWN[step] - before)
            assert metrics["rollout/groups_left_out"] == PER_BATCH * (DRAWN[step] - before - 1)
            assert metrics["rollout/groups_alike"] == (0.5 if step == 2 else 0.0)
            asked = range(before * PER_BATCH, DRAWN[step] * PER_BATCH)
            assert metrics["objective/scores"] == pytest.approx(mean(asked, even=1, odd=1))
            assert metrics["objective/scores_learned"] == pytest.approx(mean(CHOSEN[step], even=1, odd=1))
            assert metrics["objective/even"] == pytest.approx(mean(asked, even=1))
            assert metrics["objective/odd"] == pytest.approx(mean(asked, odd=1))


def mean(prompts, even: int = 0, odd: int = 0) -> float:
    """The mean score of the responses to these prompts, with the parts that are asked for."""
    scores = [even * (i % 2 == 0) + odd * differs(i) * (sample % K) for i in prompts for sample in range(K)]
    return sum(scores) / len(scores)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_without_it_on_the_same_prompts_learns_the_same(ranks, run):
    for found in ranks:
        whole, plain = found[run]["whole"], found[run]["plain"]
        for one, other in zip(whole["reports"], plain["reports"], strict=True):
            assert one["keys"] == other["keys"]
            assert all(torch.equal(a, b) for a, b in zip(one["batch"], other["batch"], strict=True))
            shared = {name: value for name, value in other["metrics"].items() if name not in OF_ALL_DRAWN}
            assert {name: one["metrics"][name] for name in shared} == pytest.approx(shared, rel=1e-12, abs=1e-12)
        assert_same_weights(whole["end"], plain["end"])


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_draws_on_where_it_was(ranks, run):
    for found in ranks:
        whole, resumed = found[run]["whole"], found[run]["resumed"]
        later = whole["reports"][SAVED_AFTER:]
        assert [report["keys"] for report in resumed["reports"]] == [report["keys"] for report in later]
        for one, other in zip(later, resumed["reports"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one["batch"], other["batch"], strict=True))
        assert whole["end"]["state"] == resumed["end"]["state"] and whole["end"]["state"]["prompt_batches"] == DRAWN[-1]
        assert_same_weights(whole["end"], resumed["end"])


def assert_same_weights(one: dict, other: dict) -> None:
    """Bit for bit."""
    assert one["weights"].keys() == other["weights"].keys()
    for model, tensors in one["weights"].items():
        assert tensors and all(torch.equal(tensor, other["weights"][model][name]) for name, tensor in tensors.items())
