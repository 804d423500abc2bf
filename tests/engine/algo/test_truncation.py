"""Ends at a token: by hand, and against lm-human-preferences' own formula on random tokens."""

import numpy as np
import pytest
import torch

from engine.algo.truncation import has_end, kept_positions, trim_query

DOT = 13
RESPONSES = torch.tensor([[DOT, 5, DOT, 6, DOT], [5, 6, 7, 8, 9], [5, 6, 7, 8, DOT], [DOT, 5, 6, 7, 8]])


@pytest.mark.parametrize(
    "after, kept, ended",
    [
        (0, [1, 5, 5, 1], [True, False, True, True]),
        (1, [3, 5, 5, 5], [True, False, True, False]),
        (2, [3, 5, 5, 5], [True, False, True, False]),
        (3, [5, 5, 5, 5], [True, False, True, False]),
        (5, [5, 5, 5, 5], [False, False, False, False]),
    ],
)
def test_truncation_by_hand(after, kept, ended):
    positions = kept_positions(RESPONSES, DOT, after)
    assert positions.sum(-1).tolist() == kept
    assert torch.equal(positions, torch.arange(5) < torch.tensor(kept).unsqueeze(-1))
    assert has_end(RESPONSES, DOT, after).tolist() == ended


def test_truncation_against_a_search_row_by_row():
    tokens = np.random.default_rng(0).integers(0, 4, (200, 9))
    for after in (0, 4):
        for row, kept, ended in zip(
            tokens.tolist(),
            kept_positions(torch.tensor(tokens), 3, after).tolist(),
            has_end(torch.tensor(tokens), 3, after).tolist(),
        ):
            places = [place for place, token in enumerate(row) if token == 3 and place >= after]
            assert ended == bool(places)
            assert kept == [place <= places[0] if places else True for place in range(9)]


@pytest.mark.parametrize(
    "tokens, start, end, expected",
    [
        ([1, DOT, 2, 3, DOT, 4, 5], None, None, [1, DOT, 2, 3]),
        ([1, DOT, 2, 3, DOT, 4, 5], DOT, None, [2, 3, DOT, 4]),
        ([1, DOT, 2, 3, DOT, 4, 5], DOT, DOT, [2, 3, DOT]),
        ([1, DOT, 2, DOT, DOT, 4, 5], None, DOT, [1, DOT, 2, DOT]),  # the last one within the length
        ([1, 2, 3], DOT, None, None),  # nowhere to start
        ([1, DOT, 2, 3, 4, 5, DOT], DOT, DOT, None),  # the end comes too late
        ([1, 2, DOT], DOT, None, [1, 2, DOT]),  # a start with nothing behind it cuts nothing
        ([1, 2, DOT], DOT, DOT, [1, 2, DOT]),
        ([], None, None, []),
        ((1, 2), None, 2, [1, 2]),
    ],
)
def test_queries_by_hand(tokens, start, end, expected):
    assert trim_query(tokens, 4, start, end) == expected
