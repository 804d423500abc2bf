"""What a course says at a KL, and several seeds together: scripts/comparison/frontier.py by hand calculation."""

import math

import pytest

from scripts.comparison.frontier import (
    Band,
    Point,
    band,
    best_place_under,
    best_score_under,
    curve,
    place_of,
    read_at,
    score_at,
)


def course(*pairs):
    return [Point(*pair) for pair in pairs]


def test_a_course_is_read_where_it_is_best_at_a_kl():
    straight, back = course((0, 0), (2, 1), (6, 2)), course((0, 0), (4, 1), (2, 2), (6, 1))
    assert [score_at(straight, kl) for kl in (0, 1, 2, 4, 6)] == [0, 0.5, 1, 1.5, 2]
    assert score_at(straight, 6.1) is None
    assert score_at(back, 3) == 1.75, "0.75 on its way out, 1.5 on its way back, 1.75 on its way out again"
    assert score_at(back, 1) == 0.25
    assert score_at([], 1) is None
    assert place_of(back, 3) == 2.25, "a quarter of the last line"
    assert (read_at([8, 4, 2, 1], 1.5), read_at([8, 4, 2, 1], 3.0)) == (3, 1)
    assert place_of(straight, 7) is None


def test_the_best_score_under_a_kl():
    assert best_score_under(course((0, 0), (4, 1), (2, 2), (6, 1)), 3) == 2, "an evaluation"
    assert best_score_under(course((0, 0), (8, 4)), 2) == 1, "what a run that went too far had on its way"
    assert best_score_under(course((0, 0.5), (8, -4)), 2) == 0.5
    assert best_score_under(course((3, 1)), 2) is None
    assert best_place_under(course((0, 0), (4, 1), (2, 2), (6, 1)), 3) == 2
    assert best_place_under(course((0, 0), (8, 4)), 2) == 0.25
    assert best_place_under(course((3, 1)), 2) is None


def test_bands_are_over_the_seeds_that_came_so_far():
    found = band([1.0, None, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.error == pytest.approx(1 / math.sqrt(3))
    assert band([5.0]) == Band(5.0, None, 1)
    assert band([None, None]) is None


def test_a_curve_ends_where_the_first_seed_does():
    found = curve([course((0, 0), (4, 4)), course((0, 2), (2, 2))], points=2)
    assert [(kl, values.mean) for kl, values in found] == [(0, 1), (1, 1.5), (2, 2)]
    assert [values.error for _, values in found] == [1, 0.5, 0]  # stdev of a pair / sqrt 2: half its difference
    assert curve([course((0, 1))]) == []
