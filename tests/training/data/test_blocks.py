"""Texts cut into blocks; "a" is 10, "b" 11, ... and BOS 1."""

import pytest

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import BOS, word_tokenizer
from training.data.examples import TextBlocks

ROWS = [{"text": "a b c"}, {"text": ""}, {"text": "d e f g h"}, {"text": " \n"}, {"text": "i"}]


def test_texts_stand_one_behind_the_other():
    blocks = TextBlocks(ROWS, word_tokenizer(), block_length=4)
    assert list(blocks) == [[10, 11, 12, 13], [14, 15, 16, 17]] and len(blocks) == 2  # the 9th id is left over


def test_each_text_begins_with_its_opening_tokens():
    assert list(TextBlocks(ROWS, word_tokenizer("<s>", "</s>"), block_length=6)) == [
        [BOS, 10, 11, 12, BOS, 13],
        [14, 15, 16, 17, BOS, 18],
    ]


def test_too_little_text():
    with pytest.raises(UserError, match="the 5 texts for pretraining make no block of 10 tokens; give more text"):
        TextBlocks(ROWS, word_tokenizer(), block_length=10)
