"""The order of visits: every prompt once an epoch, independent of ranks and resumes; each rank's share of it in each
step.
"""

import numpy as np
import pytest
import torch

from engine import distributed
from engine.errors import UserError
from tests.training.data.tiny_tokenizers import PAD, word_tokenizer
from training.data import order as order_module
from training.data.examples import Prompts, TextBlocks
from training.data.order import PromptOrder, ShuffledPrompts, ShuffledTexts, epoch_batches, epoch_permutation


def test_an_epoch_is_a_permutation_keyed_by_seed_and_epoch():
    draws = {(seed, epoch): tuple(epoch_permutation(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert all(sorted(draw) == list(range(50)) for draw in draws.values())
    assert len(set(draws.values())) == 9  # (1, 2) is another key than (2, 1)
    assert tuple(epoch_permutation(50, 1, 2)) == draws[1, 2]


def test_orders_stay_what_they_were():
    """A run that goes on visits the data in the order in which it began."""
    assert epoch_permutation(10, 3, 2).tolist() == [7, 4, 1, 8, 6, 0, 2, 9, 3, 5]
    assert [part.tolist() for part in PromptOrder(5, 3, seed=7).batch(1)] == [[1, 3, 3], [0, 0, 1]]
    assert list(epoch_batches(11, 2, epoch=1, seed=3, rank=1, world=2)) == [[10, 1], [9, 0]]
    whole = epoch_batches(11, 2, epoch=1, seed=3, rank=1, world=2, drop_last=False)
    assert list(whole) == [[10, 1], [9, 0], [6, 3]] and whole[1:] == [[9, 0], [6, 3]] and whole[-1] == [6, 3]
    assert list(epoch_batches(11, 1, epoch=1, seed=3, rank=2, world=4, drop_last=False)) == [[10], [9], [6]]


def test_prompts_are_the_epochs_in_a_row_cut_into_batches():
    order = PromptOrder(5, batch_size=3, seed=7)
    indices, visits = zip(*(order.batch(step) for step in range(5)))
    assert all(part.dtype == torch.int64 and part.shape == (3,) for part in indices + visits)
    epochs = np.concatenate([epoch_permutation(5, 7, epoch) for epoch in range(3)])
    assert torch.cat(indices).tolist() == epochs.tolist()
    assert torch.cat(visits).tolist() == [0] * 5 + [1] * 5 + [2] * 5


def test_a_permutation_is_drawn_once_an_epoch(monkeypatch):
    """However many prompts there are; the batches stay those of one drawn for each."""
    drawn = []

    def counted(size, seed, epoch):
        drawn.append(epoch)
        return epoch_permutation(size, seed, epoch)

    def anew(step):
        """One prompt after the other, each from its epoch's permutation."""
        visits = [place // 11 for place in range(4 * step, 4 * step + 4)]
        return [
            int(epoch_permutation(11, 3, place // 11)[place % 11]) for place in range(4 * step, 4 * step + 4)
        ], visits

    monkeypatch.setattr(order_module, "epoch_permutation", counted)
    order = PromptOrder(11, batch_size=4, seed=3)
    for step in range(11):  # 4 epochs
        assert tuple(part.tolist() for part in order.batch(step)) == anew(step)
    assert drawn == [0, 1, 2, 3]
    for step in (11, 2, 12, 5, 5, 0):  # not in a row
        assert tuple(part.tolist() for part in order.batch(step)) == anew(step)


def test_a_batch_larger_than_the_data_is_refused():
    assert len(PromptOrder(5, batch_size=5, seed=0).batch(0)[0]) == 5
    with pytest.raises(UserError, match="a batch of 6 prompts is asked for, and there are 5"):
        PromptOrder(5, batch_size=6, seed=0)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_global_batches_do_not_depend_on_the_number_of_ranks(world):
    epoch = epoch_permutation(11, 3, 1).tolist()
    ranks = [epoch_batches(11, 4 // world, epoch=1, seed=3, rank=rank, world=world) for rank in range(world)]
    assert [sum((batches[b] for batches in ranks), []) for b in range(2)] == [epoch[:4], epoch[4:8]]
    assert all([len(batch) for batch in batches] == [4 // world] * 2 for batches in ranks)


def test_the_last_batch_may_be_short_but_all_ranks_have_it():
    epoch = epoch_permutation(11, 3, 1).tolist()
    ranks = [epoch_batches(11, 1, epoch=1, seed=3, rank=rank, world=4, drop_last=False) for rank in range(4)]
    assert [len(batches) for batches in ranks] == [3] * 4
    assert sum((batches[2] for batches in ranks), []) == epoch[8:]
    alone = epoch_batches(3, 4, epoch=0, seed=0, rank=0, world=1, drop_last=False)
    assert list(alone) == [epoch_permutation(3, 0, 0).tolist()]


def test_data_smaller_than_one_batch_are_refused():
    assert len(epoch_batches(8, 4, epoch=0, seed=0, rank=1, world=2)) == 1
    with pytest.raises(UserError, match="7 examples are fewer than one batch of 4 on each rank, of 2"):
        epoch_batches(7, 4, epoch=0, seed=0, rank=1, world=2)


LETTERS = "abcdefg"


@pytest.fixture
def on_rank(monkeypatch):
    def on_rank(rank: int, world: int) -> None:
        monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)  # another test may have joined a group
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))

    return on_rank


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_ranks_prompts_are_the_order_in_pieces(on_rank, world):
    prompts = Prompts([{"prompt": letter} for letter in LETTERS], word_tokenizer(), 4)
    for step in range(4):
        indices, visits = PromptOrder(len(LETTERS), 6, seed=5).batch(step)
        found = []
        for rank in range(world):
            on_rank(rank, world)
            batch = ShuffledPrompts(prompts, per_rank=6 // world, seed=5, pad_token_id=PAD).prompts(step)
            found += zip(batch.input_ids[:, 0].tolist(), batch.indices.tolist(), batch.samples.tolist())
        assert found == [(10 + index, index, visit) for index, visit in zip(indices.tolist(), visits.tolist())]


@pytest.mark.parametrize("world", [1, 2])
def test_the_ranks_texts_are_the_order_in_pieces(on_rank, world):
    blocks = TextBlocks([{"text": " ".join(LETTERS)}], word_tokenizer(), block_length=1)
    for step in range(3):
        found = []
        for rank in range(world):
            on_rank(rank, world)
            found += ShuffledTexts(blocks, per_rank=4 // world, seed=5).texts(step).tolist()
        assert found == [[10 + index] for index in PromptOrder(len(LETTERS), 4, seed=5).batch(step)[0].tolist()]
