"""Which rows go through a model together, by hand and over many random lengths."""

import random
from types import SimpleNamespace

import pytest
import torch

from engine.packing import micro_batches, pack, passes
from tests.engine.fake_models import rollout_of


def rollout(prompts: list[int], responses: list[int]):
    """Rows of these lengths."""
    return rollout_of([[5] * length for length in prompts], [[6] * length for length in responses], 0)


def lists(pieces: list[torch.Tensor]) -> list[list[int]]:
    return [piece.tolist() for piece in pieces]


@pytest.mark.parametrize(
    "prompts, responses, tokens, pieces",
    [
        # Sums 6, 3, 9, 4: in order rows 1, 3, 0, 2. 1 and 3 are 3 + 2 wide: 10 tokens; with 0 it is 4 + 2 wide: 18.
        ([4, 1, 5, 3], [2, 2, 4, 1], 18, [[1, 3, 0], [2]]),
        ([4, 1, 5, 3], [2, 2, 4, 1], 17, [[1, 3], [0], [2]]),  # 0 and 2 are 5 + 4 wide: 18
        ([4, 1, 5, 3], [2, 2, 4, 1], 9, [[1], [3], [0], [2]]),
        ([4, 1, 5, 3], [2, 2, 4, 1], 36, [[1, 3, 0, 2]]),
        ([4, 1, 5, 3], [2, 2, 4, 1], 1, [[1], [3], [0], [2]]),  # longer than allowed: alone
        # As long in all, but 9 + 9 wide together: 36 tokens, not 20.
        ([9, 1], [1, 9], 35, [[0], [1]]),
        ([9, 1], [1, 9], 36, [[0, 1]]),
        ([3, 3, 3, 3], [1, 1, 1, 1], 8, [[0, 1], [2, 3]]),  # equals in their own order
        ([7], [3], 10, [[0]]),
    ],
)
def test_by_hand(prompts, responses, tokens, pieces):
    assert pack(prompts, responses, tokens) == pieces
    assert lists(micro_batches(rollout(prompts, responses), tokens)) == pieces


@pytest.mark.parametrize(
    "tokens, pieces",
    [
        (22, [[1, 3, 0, 2]]),
        (21, [[1, 3, 0], [2]]),  # 3 + 4 + 6 = 13
        (12, [[1, 3], [0], [2]]),  # 7
        (6, [[1], [3], [0], [2]]),
    ],
)
def test_without_padding_real_tokens_count(tokens, pieces):
    prompts, responses = [4, 1, 5, 3], [2, 2, 4, 1]
    assert pack(prompts, responses, tokens, padded=False) == pieces
    assert lists(micro_batches(rollout(prompts, responses), tokens, padded=False)) == pieces
    assert pack([2, 2, 2, 3, 3], [1] * 5, 11, padded=False) == [[0, 1, 2], [3, 4]]


def test_every_row_once_in_order_and_within_the_budget():
    draw = random.Random(3)
    for _ in range(200):
        rows, tokens = draw.randint(1, 40), draw.randint(1, 400)
        prompts, responses = ([draw.randint(1, 60) for _ in range(rows)] for _ in range(2))
        pieces = pack(prompts, responses, tokens)
        dealt = [row for piece in pieces for row in piece]
        assert sorted(dealt) == list(range(rows))
        assert dealt == sorted(range(rows), key=lambda row: prompts[row] + responses[row])
        for piece, following in zip(pieces, [*pieces[1:], []]):
            assert len(piece) == 1 or area(piece, prompts, responses) <= tokens
            # Nothing more would have fitted.
            assert not following or area([*piece, following[0]], prompts, responses) > tokens


def area(piece: list[int], prompts: list[int], responses: list[int]) -> int:
    """Tokens of a pass over these rows, padding included."""
    return len(piece) * (max(prompts[row] for row in piece) + max(responses[row] for row in piece))


@pytest.mark.parametrize(
    "others, pieces",
    [
        (1, [[0, 1, 2, 3], [4]]),
        (2, [[0, 1, 2, 3], [4]]),
        (3, [[0, 1], [2, 3], [4]]),
        (4, [[0], [1], [2, 3], [4]]),
        (5, [[0], [1], [2], [3], [4]]),
    ],
)
def test_as_many_passes_as_the_rank_that_needs_most(monkeypatch, others, pieces):
    """Five rows: four of 3 tokens go together (12), one of 10 alone; where others need more, the largest is halved."""
    asked = []
    monkeypatch.setattr("engine.packing.distributed.largest", lambda own: asked.append(own) or max(own, others))
    rows = rollout([2, 2, 2, 2, 6], [1, 1, 1, 1, 4])
    assert lists(micro_batches(rows, 12, equally_many=True)) == pieces
    assert asked == [2]
    assert lists(micro_batches(rows, 12)) == [[0, 1, 2, 3], [4]] and asked == [2]  # alone, nobody is asked


def test_three_rows_are_halved_into_one_and_two(monkeypatch):
    monkeypatch.setattr("engine.packing.distributed.largest", lambda own: 2)
    assert lists(micro_batches(rollout([1, 1, 1], [1, 1, 1]), 6, equally_many=True)) == [[0], [1, 2]]


def test_ranks_of_different_sizes_are_an_error(monkeypatch):
    monkeypatch.setattr("engine.packing.distributed.largest", lambda own: 3)
    with pytest.raises(AssertionError, match="2 rows cannot be dealt to 3 passes"):
        micro_batches(rollout([1, 1], [1, 1]), 4, equally_many=True)


def test_ranks_that_compute_together_divide_their_rows_among_the_same_passes(monkeypatch):
    """Lengths 4, 2 on one rank, 3 on the next and none on the last; 5 tokens a pass, the most that a rank asks for."""
    given = [([2, 1], [2, 1], 5), ([1], [2], 3), ([], [], 1)]
    found = []
    for place in range(3):  # each rank gathers what all have given
        group = SimpleNamespace(
            place=place, all_objects=lambda own, place=place: given[:place] + [own] + given[place + 1 :]
        )
        found.append(passes(*given[place], padded=False, group=group))
    assert found == [[[1], [0]], [[0], []], [[], []]]
