"""Texts of step 1 and their batches, on a tokenizer whose ids are known: "a" is 10, "b" 11, "c" 12, "d" 13, "e" 14."""

import pytest
import torch

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import BOS, EOS, PAD, word_tokenizer
from training.data.examples import SFTExample, SFTExamples, collate_sft

ANSWERED = {"prompt": "a b", "response": " c d"}


def sft(*rows, before="", max_length=8, loss_on="response", overlong="cut_prompt"):
    return SFTExamples(list(rows), word_tokenizer(before), max_length, loss_on, overlong=overlong)


def test_sft_learns_the_response_and_its_eos():
    examples = sft(ANSWERED, {"text": "c d e"})
    assert list(examples) == [([10, 11, 12, 13, EOS], 2), ([12, 13, 14, EOS], 1)]
    assert len(examples) == 2 and examples.cut == examples.dropped == 0


def test_sft_with_bos_learns_the_text_from_its_first_token():
    assert list(sft(ANSWERED, {"text": "c d"}, {"prompt": "", "response": "c"}, before="<s>")) == [
        ([BOS, 10, 11, 12, 13, EOS], 3),
        ([BOS, 12, 13, EOS], 1),
        ([BOS, 12, EOS], 1),
    ]


def test_sft_on_all_learns_the_prompt_too():
    assert sft(ANSWERED, loss_on="all")[0] == ([10, 11, 12, 13, EOS], 1)


def test_sft_without_bos_cannot_learn_the_first_token():
    assert sft({"prompt": "", "response": "c d"})[0] == ([12, 13, EOS], 1)


def test_a_cut_text_does_not_end():
    examples = sft(ANSWERED, {"text": "c d e"}, {"text": "c d e a"}, max_length=4, overlong="cut_answer")
    # The second fits with its EOS; the third would fit only without.
    assert [example.token_ids for example in examples] == [[10, 11, 12, 13], [12, 13, 14, EOS], [12, 13, 14, 10]]
    assert examples.cut == 2


def test_a_text_of_which_nothing_is_to_be_learned_is_left_out():
    examples = sft(ANSWERED, {"prompt": "a b c", "response": " d"}, max_length=3, overlong="cut_answer")
    assert list(examples) == [([10, 11, 12], 2)]
    assert (examples.cut, examples.dropped) == (1, 1)
    with pytest.raises(UserError, match="none of the 1 texts has a token to be learned within max_length 2"):
        sft(ANSWERED, max_length=2, overlong="cut_answer")


def test_an_unknown_loss_is_refused():
    with pytest.raises(UserError, match="loss_on is 'prompt'; choose 'response' or 'all'"):
        sft(ANSWERED, loss_on="prompt")


def test_sft_batch():
    batch = collate_sft([SFTExample([10, 11, 12, 13, EOS], 3), SFTExample([12, PAD, EOS], 1)], pad_id=PAD)
    assert batch.sequences.tolist() == [[10, 11, 12, 13, EOS], [12, PAD, EOS, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, False, True, True], [True, True, False, False]]
    assert batch.sequences.dtype == batch.attention_mask.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool
