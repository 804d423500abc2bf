"""Texts to ids at the border of prompt and response, and the ids that end a response."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from engine.errors import UserError
from tests.training.data.reading import rows_of
from tests.training.data.tiny_tokenizers import BOS, EOS, chat_tokenizer, merging_tokenizer, word_tokenizer
from training.data.forms import PAIRS
from training.data.tokens import (
    TextEncoder,
    opening_tokens,
    stop_token_ids,
)

SHARED = Path(__file__).resolve().parents[4] / "shared"
CHATML = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> \n{% endfor %}</s>"


@pytest.fixture(scope="module")
def sentencepiece():
    model = SHARED / "models" / "stories260K"
    if not model.exists():
        pytest.skip("no SentencePiece tokenizer at ../shared/models/stories260K")
    return AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize(
    "before, after, opening",
    [("", "", []), ("<s>", "", [BOS]), ("", "</s>", []), ("<s>", "</s>", [BOS]), ("</s>", "", [EOS])],
)
def test_a_prompt_opens_as_the_tokenizer_has_it_and_never_closes(before, after, opening):
    tokenizer = word_tokenizer(before, after)
    assert opening_tokens(tokenizer) == opening
    assert TextEncoder(tokenizer).prompt("a b") == opening + [10, 11]
    assert TextEncoder(tokenizer).prompt("") == opening
    assert TextEncoder(tokenizer).continuation("a", " b") == [11]


def test_a_bos_that_is_spelled_out_is_not_doubled():
    assert TextEncoder(word_tokenizer("<s>")).prompt("<s> a") == [BOS, 10]


def test_eos_is_added_once():
    assert TextEncoder(word_tokenizer()).ended([10]) == [10, EOS]
    assert TextEncoder(word_tokenizer()).ended([10, EOS]) == [10, EOS]
    with pytest.raises(UserError, match="has no EOS token"):
        TextEncoder(word_tokenizer(eos_token=None)).ended([10])


@pytest.mark.parametrize(
    "prompt, text, ids",
    [
        ("c", "ab", [14]),  # "cab" is c, ab: cut behind the prompt
        ("a", "bc", [12, 13]),  # "abc" is ab, c: behind a newline, "\nbc" would merge too, so alone
        ("ca", "b", [12]),
        ("", "ab", [14]),
    ],
)
def test_a_continuation_keeps_the_ids_of_its_prompt(prompt, text, ids):
    assert TextEncoder(merging_tokenizer()).continuation(prompt, text) == ids


def test_a_continuation_gets_no_space_from_sentencepiece(sentencepiece):
    encoder = TextEncoder(sentencepiece)
    the, space, _t, _h, _e = sentencepiece.convert_tokens_to_ids(["▁the", "▁", "t", "h", "e"])
    assert encoder.continuation("Review :", " the") == [the]
    # "Review : the" would merge the space into "the"; encoded alone, "the" would be given a second space.
    assert encoder.prompt("Review : ")[-1] == space
    ids = encoder.prompt("Review : ") + encoder.continuation("Review : ", "the")
    assert the not in ids
    assert sentencepiece.decode(ids, skip_special_tokens=True) == "Review : the"


def test_real_answers_are_tokenised_as_parts_of_the_whole(sentencepiece):
    path = SHARED / "data" / "reviews" / "pairs.jsonl"
    if not path.exists():
        pytest.skip("no preference pairs at ../shared/data/reviews")
    encoder = TextEncoder(sentencepiece)
    for row in rows_of(path, PAIRS)[:100]:
        prompt, answer = row["prompt"], row["chosen"]
        parts = encoder.prompt(prompt) + encoder.continuation(prompt, answer)
        assert parts == encoder.prompt(prompt + answer)


def test_an_answer_that_ends_its_turn_has_ended():
    tokenizer = chat_tokenizer(CHATML)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    encoder = TextEncoder(tokenizer)
    assert encoder.answered("a", " b <|im_end|>") == ([10, 11, end_of_turn], 1)
    assert encoder.answered("a", " b") == ([10, 11, EOS], 1)
    assert encoder.ended([10, EOS]) == [10, EOS]


def config(eos_token_id):
    return SimpleNamespace(eos_token_id=eos_token_id)


@pytest.mark.parametrize(
    "generation_config, model_config, stops",
    [
        (config(30), config(31), [EOS, 30]),
        (config([30, 0]), config(31), [0, EOS, 30]),
        (config(0), config(31), [0, EOS]),  # id 0 is an id
        (config(None), config([31, EOS]), [EOS, 31]),
        (config(None), SimpleNamespace(), [EOS]),
        (None, None, [EOS]),
    ],
)
def test_stops_of_the_configs_and_the_tokenizer(generation_config, model_config, stops):
    assert stop_token_ids(word_tokenizer(), generation_config, model_config) == stops


@pytest.mark.parametrize(
    "template, ends",
    [
        (CHATML, True),
        ("{% for m in messages %}<|im_start|> {{ m.content }} {% endfor %}", False),  # nothing ends a turn
        ("{% for m in messages %}{{ m.role }} : {{ m.content }} </s>{% endfor %}", False),
        ("<|im_start|> {{ messages[0].content }} <|im_end|>", False),  # shows no assistant
    ],
)
def test_the_stop_of_the_chat_template(template, ends):
    tokenizer = chat_tokenizer(template)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_token_ids(tokenizer, None, None) == [EOS] + [end_of_turn] * ends


def test_a_model_that_nothing_stops_is_refused():
    with pytest.raises(UserError, match="no token ends a response"):
        stop_token_ids(word_tokenizer(eos_token=None), None, None)
