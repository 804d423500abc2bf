"""The interval beside one that is computed sample by sample, Student's table, and how often chance looks like more."""

import itertools
import math
import random
from statistics import NormalDist

import numpy as np
import pytest

from training.tools.compare.measures import interval, sign_flip_p, student_quantile

TABLE = {1: 12.7062, 2: 4.3027, 4: 2.7764, 9: 2.2622, 30: 2.0423, 120: 1.9799, 2000: 1.9612}


@pytest.mark.parametrize("degrees, expected", TABLE.items())
def test_students_quantile_is_the_tables(degrees, expected):
    assert student_quantile(degrees) == pytest.approx(expected, abs=2e-4)


def plain_interval(values: list[float], t: float) -> tuple[float, float]:
    """The same, a resample at a time, with another generator of random numbers."""
    rng, n = random.Random(5), len(values)
    means = sorted(sum(rng.choices(values, k=n)) / n for _ in range(10_000))
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * t)
    return means[round(tail * 9_999)], means[round((1 - tail) * 9_999)]


def test_the_interval_is_that_of_a_plain_bootstrap():
    values = np.random.default_rng(0).gamma(2.0, 1.0, 31)
    found = interval(values, 0.0, seed=1)
    low, high = plain_interval(values.tolist(), TABLE[30])
    width = high - low
    assert found.value == pytest.approx(sum(values.tolist()) / 31)
    assert abs(found.low - low) < 0.04 * width and abs(found.high - high) < 0.04 * width  # noise of 10,000 resamples
    assert found.differs and not interval(values, found.value, seed=1).differs
    assert interval(values, 0.0, seed=1) == found != interval(values, 0.0, seed=2)


def test_many_prompts_are_drawn_in_pieces_and_approach_the_normal_interval():
    values = np.random.default_rng(1).normal(0.3, 1.0, 3_000)
    found = interval(values, 0.0, seed=3)
    half = 1.96 * values.std(ddof=1) / math.sqrt(3_000)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.05 * half)
    assert found.p == pytest.approx(1 / 10_001)  # 16 standard errors: no pattern of signs comes near


def test_signs_are_flipped_in_every_pattern():
    values = [0.5, -0.25, 0.5, 1.0, 0.0]
    sums = [abs(sum(s * v for s, v in zip(signs, values))) for signs in itertools.product((1, -1), repeat=5)]
    expected = sum(total >= 1.75 for total in sums) / 32
    assert expected == 0.25  # by hand: of 0.5, 0.25, 0.5, 1 all one way (2.25), or all but 0.25 (1.75)
    assert sign_flip_p(np.array(values), np.random.default_rng(0)) == expected
    assert sign_flip_p(np.zeros(9), np.random.default_rng(0)) == 1.0


def test_random_patterns_agree_with_the_binomial():
    wins = np.array([0.5] * 20 + [-0.5] * 8 + [0.0] * 50)
    tail = sum(math.comb(28, k) for k in range(20, 29)) / 2**28  # the sign test: 20 or more of 28 coins
    assert sign_flip_p(wins, np.random.default_rng(0)) == pytest.approx(2 * tail, abs=0.007)


def test_ties_that_leave_the_resamples_nothing_to_differ_in_are_no_significance():
    ties = interval(np.full(40, 0.5), 0.5, seed=1)
    assert (ties.value, ties.low, ties.high, ties.p, ties.differs) == (0.5, 0.5, 0.5, 1.0, False)
    all_won = interval(np.ones(4), 0.5, seed=1)  # no resample is less than 1, and yet 4 coins: p = 2 / 16
    assert (all_won.value, all_won.low, all_won.high, all_won.p) == (1.0, 0.5, 1.0, 0.125) and not all_won.differs
    assert interval(np.ones(9), 0.5, seed=1).differs
    # 5 wins among 200 ties: resamples without any of them are rarer than 2.5 %, and 5 coins fall alike 1 time in 16.
    few = interval(np.array([1.0] * 5 + [0.5] * 195), 0.5, seed=1)
    assert few.p == 0.0625 and few.low == 0.5 and not few.differs


@pytest.mark.parametrize("prompts, samples", [(8, 1), (40, 1), (100, 2)])
def test_two_samplings_of_one_model_differ_in_one_of_twenty_seeds_at_most(prompts, samples):
    seen = {"wins": 0, "scores": 0}
    for seed in range(200):
        rng = np.random.default_rng(seed)
        means = rng.normal(0, 2, (prompts, 1))
        one, other = (means + rng.exponential(1.0, (prompts, samples)) for _ in range(2))
        tied = rng.random((prompts, samples)) < 0.3
        differences = np.where(tied, 0.0, one - other)
        wins = (np.sign(differences) + 1) / 2
        seen["wins"] += interval(wins.mean(1), 0.5, seed).differs
        seen["scores"] += interval(differences.mean(1), 0.0, seed).differs
    # Of 200 at 5 %: 10 expected, and more than 19 come once in 300 times.
    assert all(count <= 19 for count in seen.values()), seen
    assert prompts == 8 or sum(seen.values()) > 2, f"an interval that never leaves anything out tells nothing: {seen}"


def test_an_interval_holds_the_true_mean_in_nineteen_of_twenty_seeds():
    held = 0
    for seed in range(200):
        values = (np.random.default_rng(seed).random(60) < 0.7).astype(float)
        found = interval(values, 0.5, seed)
        held += found.low <= 0.7 <= found.high
    assert 180 <= held <= 198, held


def test_a_better_model_is_found():
    rng = np.random.default_rng(0)
    assert sum(interval((rng.random(80) < 0.75).astype(float), 0.5, seed).differs for seed in range(20)) >= 19
