"""What becomes of scores, by hand: missing ends, clipping, and deviations of batches against NumPy."""

import numpy as np
import pytest
import torch

from engine.algo.masked import moments
from engine.algo.rewards import ScoreScale, apply_missing_end, clip_scores

SCORES, ENDED = torch.tensor([3.0, -2.0, 0.5]), torch.tensor([True, False, False])


def test_missing_ends_by_hand():
    assert apply_missing_end(SCORES, ENDED, "none", 7.0).tolist() == [3.0, -2.0, 0.5]
    assert apply_missing_end(SCORES, ENDED, "replace", -1.0).tolist() == [3.0, -1.0, -1.0]
    assert apply_missing_end(SCORES, ENDED, "subtract", 1.0).tolist() == [3.0, -3.0, -0.5]
    assert SCORES.tolist() == [3.0, -2.0, 0.5]
    with pytest.raises(ValueError, match="'add': known are none, replace, subtract"):
        apply_missing_end(SCORES, ENDED, "add", 1.0)


def test_clipping():
    assert clip_scores(SCORES, 1.0).tolist() == [1.0, -1.0, 0.5]
    assert clip_scores(SCORES, None) is SCORES


def totals(values) -> torch.Tensor:
    tensor = torch.tensor(values)
    return moments(tensor, torch.ones_like(tensor, dtype=torch.bool))


BATCHES = [np.random.default_rng(seed).normal(40.0 + seed, 1.0 + seed, 5) for seed in range(4)]


def test_the_running_deviation_is_that_of_all_scores_so_far():
    scale = ScoreScale("running")
    for count in range(1, 5):
        scale.update(totals(BATCHES[count - 1]))
        assert scale.value == pytest.approx(np.concatenate(BATCHES[:count]).std(ddof=1), rel=1e-9)


def test_the_first_batchs_deviation_stays():
    scale = ScoreScale("first_batch")
    for batch in BATCHES:
        scale.update(totals(batch))
        assert scale.value == pytest.approx(BATCHES[0].std(ddof=1), rel=1e-9)


def test_none_divides_by_1():
    scale = ScoreScale()
    scale.update(totals(BATCHES[0]))
    assert scale.value == 1.0


@pytest.mark.parametrize("first", [[], [5.0], [2.0, 2.0, 2.0]])
def test_a_deviation_that_is_not_there_divides_by_1(first):
    scale = ScoreScale("running")
    scale.update(totals(first))
    assert scale.value == 1.0


@pytest.mark.parametrize("kind", ["running", "first_batch"])
def test_statistics_survive_a_restart(kind):
    one, two = ScoreScale(kind), ScoreScale(kind)
    one.update(totals(BATCHES[0]))
    two.load_state_dict(one.state_dict())
    for scale in (one, two):
        scale.update(totals(BATCHES[1]))
    assert one.value == two.value != 1.0


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'ref': known are none, running, first_batch"):
        ScoreScale("ref")
