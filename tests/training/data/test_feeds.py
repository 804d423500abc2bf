"""Each rank's prompts and texts in each step: together what one rank alone would be given, in the same order."""

import pytest

from engine import distributed
from tests.training.data.tiny_tokenizers import PAD, word_tokenizer
from training.data.examples import Prompts, TextBlocks
from training.data.order import PromptOrder, ShuffledPrompts, ShuffledTexts

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
