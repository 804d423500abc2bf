"""The data sets and their batches, on a tokenizer whose ids are known: "a" is 10, "b" 11, "c" 12, "d" 13, "e" 14."""

from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import BOS, EOS, PAD, chat_tokenizer, word_tokenizer
from training.data.examples import (
    Pair,
    PairExamples,
    Prompts,
    SFTExample,
    SFTExamples,
    collate_pairs,
    collate_prompts,
    collate_sft,
)
from training.data.forms import PAIRS, PROMPTS, SFT
from training.data.mixture import load_rows
from training.data.order import PromptOrder
from training.data.rows import PAIR_COLUMNS, PROMPT_COLUMNS, SFT_COLUMNS, read_rows

SHARED = Path(__file__).resolve().parents[4] / "shared"
ANSWERED = {"prompt": "a b", "response": " c d"}


def sft(*rows, before="", max_length=8, loss_on="response"):
    return SFTExamples(list(rows), word_tokenizer(before), max_length, loss_on)


def test_sft_learns_the_response_and_its_eos():
    examples = sft(ANSWERED, {"text": "c d e"})
    assert list(examples) == [([10, 11, 12, 13, EOS], 2), ([12, 13, 14, EOS], 1)]
    assert len(examples) == 2 and examples.truncated == examples.dropped == 0


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
    examples = sft(ANSWERED, {"text": "c d e"}, {"text": "c d e a"}, max_length=4)
    # The second fits with its EOS; the third would fit only without.
    assert [example.token_ids for example in examples] == [[10, 11, 12, 13], [12, 13, 14, EOS], [12, 13, 14, 10]]
    assert examples.truncated == 2


def test_a_text_of_which_nothing_is_to_be_learned_is_left_out():
    examples = sft(ANSWERED, {"prompt": "a b c", "response": " d"}, max_length=3)
    assert list(examples) == [([10, 11, 12], 2)]
    assert (examples.truncated, examples.dropped) == (1, 1)
    with pytest.raises(UserError, match="none of the 1 texts has a token to be learned within max_length 2"):
        sft(ANSWERED, max_length=2)


def test_unknown_choices_are_refused():
    with pytest.raises(UserError, match="loss_on is 'prompt'; choose 'response' or 'all'"):
        sft(ANSWERED, loss_on="prompt")
    with pytest.raises(UserError, match="overlong is 'cut'; choose 'truncate' or 'drop'"):
        Prompts([{"prompt": "a"}], word_tokenizer(), 4, overlong="cut")


def test_sft_batch():
    batch = collate_sft([SFTExample([10, 11, 12, 13, EOS], 3), SFTExample([12, PAD, EOS], 1)], pad_id=PAD)
    assert batch.sequences.tolist() == [[10, 11, 12, 13, EOS], [12, PAD, EOS, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, False, True, True], [True, True, False, False]]
    assert batch.sequences.dtype == batch.attention_mask.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool


def pairs(*answers, max_length=8):
    rows = [{"prompt": "a", "chosen": chosen, "rejected": rejected} for chosen, rejected in answers]
    return PairExamples(rows, word_tokenizer(), max_length)


def test_pairs_end_with_eos_unless_they_are_cut():
    examples = pairs((" b", " c d e"), max_length=4)
    assert list(examples) == [([10, 11, EOS], [10, 12, 13, 14])]
    assert (examples.truncated, examples.dropped) == (1, 0)


def test_pairs_without_a_difference_are_left_out():
    examples = pairs((" b", "  b"), (" b c d", " b c e"), (" b", " c"), max_length=3)
    assert list(examples) == [([10, 11, EOS], [10, 12, EOS])]
    assert (examples.truncated, examples.dropped) == (0, 2)
    with pytest.raises(UserError, match="none of the 1 pairs differs within max_length 8"):
        pairs((" b", " b"))


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


def test_long_prompts_are_cut_on_the_left_behind_the_bos():
    rows = [{"prompt": "a b c d"}, {"prompt": "a b c", "stars": 5}]
    prompts = Prompts(rows, word_tokenizer("<s>"), max_prompt_length=4, overlong="truncate")
    assert list(prompts) == [[BOS, 11, 12, 13], [BOS, 10, 11, 12]]
    assert (prompts.truncated, prompts.dropped, list(prompts.rows)) == (1, 0, rows)
    assert list(Prompts(rows, word_tokenizer(), 3)) == [[11, 12, 13], [10, 11, 12]]


def test_long_prompts_may_be_left_out():
    rows = [{"prompt": "a b c d"}, {"prompt": "a b c", "stars": 5}]
    prompts = Prompts(rows, word_tokenizer("<s>"), max_prompt_length=4, overlong="drop")
    assert list(prompts) == [[BOS, 10, 11, 12]]
    assert (prompts.truncated, prompts.dropped, list(prompts.rows)) == (0, 1, rows[1:])
    with pytest.raises(UserError, match="none of the 2 prompts has at most 3 tokens"):
        Prompts(rows, word_tokenizer("<s>"), max_prompt_length=3, overlong="drop")
    with pytest.raises(UserError, match="max_prompt_length is 1; it needs to be at least 2"):
        Prompts(rows, word_tokenizer("<s>"), max_prompt_length=1)


def test_queries_may_start_and_end_at_tokens():
    # Behind the first 11 (b), at most 4 tokens with the BOS, up to the last 13 (d) among those.
    rows = [{"prompt": "a b c d d a"}, {"prompt": "c d a"}, {"prompt": "a b c a d"}, {"prompt": "b d d b"}]
    prompts = Prompts(rows, word_tokenizer("<s>"), max_prompt_length=4, query_start=11, query_end=13)
    assert list(prompts) == [[BOS, 12, 13, 13], [BOS, 12, 10, 13], [BOS, 13, 13]]
    assert (prompts.dropped, prompts.truncated, list(prompts.rows)) == (1, 0, [rows[0], rows[2], rows[3]])
    with pytest.raises(UserError, match="none of the 1 prompts has the dialect's query_start and query_end within 4"):
        Prompts(rows[1:2], word_tokenizer("<s>"), max_prompt_length=4, query_start=11, query_end=13)


def test_prompt_batch_is_left_padded_and_keeps_its_visits():
    batch = collate_prompts([[10], [PAD, 12, 13]], torch.tensor([7, 3]), torch.tensor([0, 2]), pad_id=EOS)
    assert batch.input_ids.tolist() == [[EOS, EOS, 10], [PAD, 12, 13]]
    assert batch.attention_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert batch.indices.tolist() == [7, 3] and batch.samples.tolist() == [0, 2]


CHATML = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> \n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


def test_messages_have_the_ids_that_the_template_gives_them(tmp_path):
    """In all three steps, read from a Parquet file, whose messages are structs."""
    tokenizer = chat_tokenizer(CHATML)
    asked = [{"role": "user", "content": "a b"}]
    chosen, rejected = (asked + [{"role": "assistant", "content": text}] for text in ("c d", "e"))
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"messages": [chosen], "chosen": [chosen], "rejected": [rejected]}), path)

    def ids(messages, **options):
        return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, **options))["input_ids"]

    def rows(form):
        return load_rows(str(path), form, tokenizer, phase=1, seed=0)[0]

    prompt = ids(asked, add_generation_prompt=True)
    assert list(SFTExamples(rows(SFT), tokenizer, 99)) == [(ids(chosen), len(prompt))]
    assert list(PairExamples(rows(PAIRS), tokenizer, 99)) == [(ids(chosen), ids(rejected))]
    assert list(Prompts(rows(PROMPTS), tokenizer, 99)) == [prompt]
    assert ids(chosen)[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")  # which ends the answer, no EOS behind it


def test_real_rows_become_batches():
    model, reviews = SHARED / "models" / "stories260K", SHARED / "data" / "reviews"
    if not (model.exists() and reviews.exists()):
        pytest.skip("no tokenizer and reviews at ../shared/models/stories260K and ../shared/data/reviews")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = {
        name: read_rows(reviews / f"{name}.jsonl", columns)[:32]
        for name, columns in (("sft", SFT_COLUMNS), ("pairs", PAIR_COLUMNS), ("prompts", PROMPT_COLUMNS))
    }
    batch = collate_sft(list(SFTExamples(rows["sft"], tokenizer, 64)), tokenizer.pad_token_id)
    assert batch.sequences.shape == (32, 64) and batch.loss_mask.sum() == batch.attention_mask[:, 1:].sum()
    batch = collate_pairs(list(PairExamples(rows["pairs"], tokenizer, 64)), tokenizer.pad_token_id)
    shared = len(tokenizer("Review :")["input_ids"])
    assert batch.sequences.shape == (64, 64) and batch.first_difference.min() == shared
    prompts = Prompts(rows["prompts"], tokenizer, 16)
    indices, visits = PromptOrder(len(prompts), 4, seed=0).batch(0)
    batch = collate_prompts([prompts[index] for index in indices.tolist()], indices, visits, tokenizer.pad_token_id)
    assert batch.input_ids.shape == (4, 16) and not batch.samples.any()
    assert all(tokenizer.bos_token_id in prompt for prompt in batch.input_ids.tolist())
