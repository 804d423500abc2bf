"""Pairs of step 2 and their batches, on a tokenizer whose ids are known: "a" is 10, "b" 11, "c" 12, "d" 13, "e" 14."""

import pytest
import torch

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import EOS, PAD, word_tokenizer
from training.data.examples import Pair, PairExamples, collate_pairs


def pairs(*answers, max_length=8, overlong="cut_prompt"):
    rows = [{"prompt": "a", "chosen": chosen, "rejected": rejected} for chosen, rejected in answers]
    return PairExamples(rows, word_tokenizer(), max_length, overlong=overlong)


def test_pairs_end_with_eos_unless_they_are_cut():
    examples = pairs((" b", " c d e"), max_length=4)
    assert list(examples) == [([10, 11, EOS], [10, 12, 13, 14])]
    assert (examples.cut, examples.dropped, examples.equal) == (1, 0, 0)


def test_pairs_without_a_difference_are_left_out():
    examples = pairs((" b", "  b"), (" b c d", " b c e"), (" b", " c"), max_length=3)
    assert list(examples) == [([10, 11, EOS], [10, 12, EOS])]
    assert (examples.cut, examples.dropped, examples.equal) == (0, 1, 1)
    with pytest.raises(UserError, match="none of the 1 pairs differs within max_length 8"):
        pairs((" b", " b"))


def test_equal_answers_are_told_from_those_that_are_too_long():
    long = " b c d e f g h"
    # Equal; equal within 4 tokens; different there; short.
    answers = (long, long), (long, long + " i"), (" c" + long, long), (" b", " c")
    for overlong, kept, dropped in (("cut_prompt", 2, 1), ("cut_answer", 2, 1), ("drop", 1, 2)):
        examples = pairs(*answers, max_length=4, overlong=overlong)
        assert (len(examples), examples.dropped, examples.equal) == (kept, dropped, 1)


def test_both_sides_lose_the_same_of_their_prompt():
    row = {"prompt": "a b c d e", "chosen": " f", "rejected": " g h i"}
    # The longer answer has 4 tokens with EOS, which leaves 3 of 7 to the prompt.
    examples = PairExamples([row], word_tokenizer(), 7)
    assert list(examples) == [([12, 13, 14, 15, EOS], [12, 13, 14, 16, 17, 18, EOS])] and examples.cut == 1
    assert list(PairExamples([row], word_tokenizer(), 7, overlong="cut_answer")) == [
        ([10, 11, 12, 13, 14, 15, EOS], [10, 11, 12, 13, 14, 16, 17])
    ]


def test_pair_batch():
    batch = collate_pairs(
        [Pair([10, 11, EOS], [10, 12, 13, EOS]), Pair([10, 11], [10, 11, PAD]), Pair([14, EOS], [10, EOS])], pad_id=PAD
    )
    assert batch.sequences.tolist() == [
        [10, 11, EOS, PAD],
        [10, 11, PAD, PAD],
        [14, EOS, PAD, PAD],
        [10, 12, 13, EOS],
        [10, 11, PAD, PAD],
        [10, EOS, PAD, PAD],
    ]
    assert batch.attention_mask.tolist() == [
        [1, 1, 1, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 0],
        [1, 1, 0, 0],
    ]
    assert batch.first_difference.tolist() == [1, 2, 0]
    assert batch.first_difference.dtype == batch.sequences.dtype == torch.int64
