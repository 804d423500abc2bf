"""What is kept whole over the micro-batches of an optimizer step saves calls, and changes no gradient but by rounding.

One rank has more micro-batches than the other, which makes as many passes.
"""

import pytest

from engine.zero.gather_once import Kept
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.engine.zero.work_gather_once import WAYS

ROUNDING = {"fp32": 1e-6, "bf16": 2**-7}  # of sums that are taken in another order


@pytest.fixture(scope="module")
def ranks(folder, batch) -> list[dict]:
    return run_ranks("tests.engine.zero.work_gather_once:steps", folder=folder, batch=batch, dtypes=list(ROUNDING))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_gradients_are_the_same(ranks, dtype, way):
    for rank in ranks:
        for model in ("actor", "critic"):
            error = plain.relative_error(rank[dtype, way][model], rank[dtype, "nothing"][model])
            assert error <= (ROUNDING[dtype] if way == "both" else 0), model
        norms = [rank[dtype, name]["metrics"]["policy/grad_norm"] for name in (way, "nothing")]
        assert norms[0] == pytest.approx(norms[1], rel=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_second_step_begins_with_no_gradient(ranks, dtype):
    """The first one was as "both", on the same weights."""
    for rank in ranks:
        assert rank[dtype, "decided"]["kept"] == [Kept(weights=True, gradients=True)] * 2
        for model in ("actor", "critic"):
            assert plain.relative_error(rank[dtype, "both"][model], rank[dtype, "decided"][model]) == 0


def test_calls(ranks):
    """By hand, of an actor and a critic with two layers, where nothing stays gathered by itself.

    A model has 5 units: embedding, two layers, last norm and head. A forward pass gathers each, and so does a backward
    pass; where they are kept each is gathered once. A pass reduces one bucket.
    """
    for rank in ranks:
        calls = {way: rank["fp32", way]["calls"] for way in WAYS}
        passes = calls["nothing"]["passes"]  # of both models
        assert passes >= 2 * 3
        assert calls == {
            "nothing": {"passes": passes, "gathers": 2 * 5 * passes, "reductions": passes},
            "weights": {"passes": passes, "gathers": 2 * 5, "reductions": passes},
            "both": {"passes": passes, "gathers": 2 * 5, "reductions": 2},
        }


def test_nothing_stays_whole_after_the_step(ranks):
    for rank in ranks:
        assert [rank["fp32", way]["whole"] for way in WAYS] == [0, 0, 0]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_weights_that_a_copy_holds_are_not_gathered(ranks, dtype):
    """Until a step changes them: then a pass gathers 5 units forward and 5 backward again."""
    for rank in ranks:
        copied, stale, usual = (rank[dtype, name] for name in ("copied", "stale", "nothing"))
        passes = usual["calls"]["passes"]
        assert copied["calls"] == {"passes": passes, "reductions": passes, "gathers": usual["calls"]["gathers"] // 2}
        assert stale["calls"] == usual["calls"]
        assert [copied["whole"], stale["whole"]] == [0, 0] and not copied["copies changed"]
        for model in ("actor", "critic"):
            assert plain.relative_error(copied[model], usual[model]) == 0
