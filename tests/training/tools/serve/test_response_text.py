"""Text that grows by tokens: whole characters, spaces where they belong, nothing of a stop string."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scripts.harness.models import make_tokenizer
from training.tools.serve.decoder import ResponseText


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(["</s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def pieces(tokenizer, prompt: str, response: str, *stops: str) -> list[str]:
    ids = tokenizer(prompt + response).input_ids
    start = len(tokenizer(prompt).input_ids)
    text = ResponseText(tokenizer, ids[:start], stops)
    found = []
    for token in ids[start:]:
        found.append(text.add(token))
        if text.stopped:
            break
    return [*found, text.finish()]


def test_words_keep_the_space_between_prompt_and_response():
    assert pieces(make_tokenizer(), "w10 w11", " w12 w13") == [" w12", " w13", ""]


def test_special_tokens_are_left_out():
    assert pieces(make_tokenizer(), "w10", " w12 <unk> w13 </s>") == [" w12", "", " w13", "", ""]


def test_a_character_is_said_once_its_last_byte_is_there():
    assert pieces(byte_tokenizer(), "a", "é€b") == ["", "é", "", "", "€", "b", ""]


def test_what_never_becomes_a_character_is_said_at_the_end():
    tokenizer = byte_tokenizer()
    text = ResponseText(tokenizer, tokenizer("a").input_ids)
    first = tokenizer("é").input_ids[0]
    assert (text.add(first), text.finish()) == ("", "\ufffd")


@pytest.mark.parametrize(
    "response, stops, said",
    [
        ("one two", ("tw",), "one "),
        ("one two", ("xx", "e t"), "on"),
        ("aab", ("ab",), "a"),
        ("aabaac", ("aac",), "aab"),
        ("one", ("one more",), "one"),
        ("b and a", ("a", "b"), ""),
    ],
)
def test_nothing_of_a_stop_string_is_said(response, stops, said):
    found = pieces(byte_tokenizer(), "x", response, *stops)
    assert "".join(found) == said


def test_what_cannot_be_the_beginning_of_a_stop_string_is_said_at_once():
    assert pieces(byte_tokenizer(), "x", "abcabd", "abd") == ["", "", "abc", "", "", "", ""]
