"""What long responses lose, by hand; which groups have no difference in their scores."""

import math

import pytest
import torch

from engine.algo.rewards import groups_alike, overlong_penalties


def test_penalties_of_length_by_hand():
    # L_max 20, L_cache 0.2 x 20 = 4: nothing up to 16 tokens, then a quarter with each, -1 from 20 on.
    lengths = torch.tensor([1, 15, 16, 17, 18, 19, 20, 25])
    expected = [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]
    assert overlong_penalties(lengths, 20, 0.2, 1.0).tolist() == pytest.approx(expected, abs=1e-6)
    assert overlong_penalties(lengths, 20, 0.2, 0.5).tolist() == pytest.approx([e / 2 for e in expected], abs=1e-6)
    assert overlong_penalties(lengths, 20, 0.2, 1.0).dtype == torch.float32


def test_penalties_of_length_as_the_paper_and_verl_write_them():
    longest, cache = 20480, 4096

    def paper(length: int) -> float:  # eq. 13
        if length <= longest - cache:
            return 0.0
        return ((longest - cache) - length) / cache if length <= longest else -1.0

    def verl(length: int, factor: float) -> float:  # verl/workers/reward_manager/dapo.py
        exceeding = length - (longest - cache)
        return min(-exceeding / cache * factor, 0)

    lengths = [1, 16383, 16384, 16385, 17000, 20000, 20479, 20480]
    given = torch.tensor(lengths)
    assert overlong_penalties(given, longest, 0.2, 1.0).tolist() == pytest.approx(list(map(paper, lengths)), abs=1e-6)
    factored = overlong_penalties(given, longest, 0.2, 2.5).tolist()
    assert factored == pytest.approx([verl(length, 2.5) for length in lengths], abs=1e-6)


def test_which_groups_are_alike():
    nan, inf = math.nan, math.inf
    groups = [[1, 1, 1], [0, 0, 1], [0.1 + 0.2, 0.3, 0.3], [-2, -2, -2], [nan, nan, nan], [1, 1, nan], [inf, inf, inf]]
    scores = torch.tensor(groups, dtype=torch.float64).flatten()
    assert groups_alike(scores, 3).tolist() == [True, False, False, True, False, False, False]
    assert groups_alike(torch.tensor([5.0, 5.0]), 1).tolist() == [True, True]
