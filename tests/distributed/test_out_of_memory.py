"""Where one of two ranks runs out of memory with a copy of a model, both go on with less, to the same responses."""

import pytest
import torch

from scripts.harness.ranks import run_ranks
from tests.distributed.work_out_of_memory import Case

MADE, FILLED = "engine.copies.empty_like", "engine.copies.try_bucket"
DRAWN, JUDGED = "engine.rollout.decode.Draws.draw", "engine.copies._inferred"
SHARED = "models of one shape take turns in one"
DIVIDED = "2 ranks hold one together"
PARTITIONS = "it computes through its partitions"
# Three times: four rows at once, two, and one, before the copy is given up.
CASES = {
    "own, moved back": Case("engine.copies.WholeCopies._move", shared=False, away=True),
    "own, filled twice": Case(FILLED, 2, shared=False),
    "made": Case(MADE),
    "filled": Case(FILLED, divided=False),
    "drawn": Case(DRAWN, 3),
    "drawn, as asked": Case(DRAWN, 3, backend="replica"),
    "judged": Case(JUDGED),
    "judged, as asked": Case(JUDGED, backend="replica"),
}
# What is told, in order (with which copies, when); how the actor's responses are drawn at last, by how many ranks.
MAKING, DRAWING = "it was made", "responses were drawn with it"
JUDGING = "experience was made with it"
EXPECTED = {
    "own, moved back": ([(MAKING, SHARED)], 1),
    "own, filled twice": ([(MAKING, SHARED), (MAKING, DIVIDED)], 2),
    "made": ([(MAKING, DIVIDED)], 2),
    "filled": ([(MAKING, DIVIDED), (MAKING, PARTITIONS)], "partitions"),
    "drawn": ([(DRAWING, DIVIDED)], 2),
    "drawn, as asked": ([(DRAWING, PARTITIONS)], "partitions"),
    "judged": ([(JUDGING, DIVIDED)], 2),
    "judged, as asked": ([(JUDGING, PARTITIONS)], "partitions"),
}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks(
        "tests.distributed.work_out_of_memory:without_failures_and_with", world=2, folder=folder, cases=CASES
    )


@pytest.mark.parametrize("case", CASES)
def test_the_step_goes_on_to_the_same_responses_and_experience(ranks, case):
    for rank in ranks:
        found, expected = rank[case], rank[""]
        assert found["answers"] == expected["answers"]
        for name, column in found["experience"].items():
            assert torch.allclose(column, expected["experience"][name], atol=5e-5), name


def test_a_step_is_finished(ranks):
    for rank in ranks:
        assert rank["step"] == {"number": 1, "answers": rank[""]["answers"][0]}


@pytest.mark.parametrize("case", CASES)
def test_one_warning_says_what_happened_and_what_comes_next(ranks, case):
    told = [
        f"a copy of the actor does not fit (CUDA out of memory on rank 1, when {doing}): {then} from now on"
        for doing, then in EXPECTED[case][0]
    ]
    first, second = (rank[case]["told"] for rank in ranks)
    assert first == told
    rows = [
        f"{n} responses decoded side by side do not fit on rank 1 (CUDA out of memory): {n // 2} are from now on"
        for n in (4, 2)
    ]
    assert second == (rows if case.startswith("drawn") else [])
    assert [rank[case]["actor"] for rank in ranks] == [EXPECTED[case][1]] * 2


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_a_copy_that_was_given_up_stays(ranks, case):
    """Left are the two modules that were made last: the reference's, in which the actor takes its turns where it still
    has a copy, and that of critic and reward model."""
    for rank in ranks:
        assert rank[case]["alive"] == [False] * (len(rank[case]["alive"]) - 2) + [True] * 2
    assert len(ranks[0][case]["alive"]) > 2


def test_what_filling_takes_is_asked_for_before_it(ranks):
    for rank in ranks:
        for asked, taken in rank["bytes"].values():
            assert 0 < taken <= asked <= 1.05 * taken
