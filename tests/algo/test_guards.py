"""The two guards at, below and above their limits, and for numbers that are none."""

import pytest

from engine.algo.losses import ratio_exploded, went_too_far


@pytest.mark.parametrize("guard", [ratio_exploded, went_too_far])
@pytest.mark.parametrize(
    "total, count, limit, expected",
    [
        (8.0, 4, 1.9, True),
        (8.0, 4, 2.0, False),
        (8.0, 4, 2.1, False),
        (8.0, 4, None, False),
        (float("nan"), 4, 2.0, True),
        (float("inf"), 4, 2.0, True),
        (float("nan"), 4, None, False),
        (0.0, 0, 2.0, False),
    ],
)
def test_the_mean_is_held_against_the_limit(guard, total, count, limit, expected):
    assert guard(total, count, limit) is expected
