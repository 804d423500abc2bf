"""Rows of which a tokenizer makes no tokens, with and without tokens that open a sequence, in all three steps."""

import pytest
from tokenizers.normalizers import BertNormalizer

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import BOS, EOS, word_tokenizer
from training.data.examples import PairExamples, Prompts, SFTExamples, prompt_batch
from training.data.forms import PROMPTS
from training.data.rows import load_rows
from training.data.tokens import EMPTY
from training.runtime.first_lines import counted, shown_rows

UNSEEN = "\u200b"  # a space of no width, which is not blank to Python, and which the tokenizer below takes out


def tokenizer(before: str = ""):
    made = word_tokenizer(before)
    made.backend_tokenizer.normalizer = BertNormalizer(lowercase=False)
    return made


@pytest.mark.parametrize("overlong", ["cut_prompt", "cut_answer", "drop"])
def test_prompts_without_tokens_are_left_out_and_counted(overlong):
    rows = [{"prompt": "a b"}, {"prompt": UNSEEN}, {"prompt": "c", "stars": 5}, {"prompt": UNSEEN * 2}]
    prompts = Prompts(rows, tokenizer(), 8, overlong)
    assert list(prompts) == [[10, 11], [12]] and list(prompts.rows) == [rows[0], rows[2]]
    assert (prompts.cut, prompts.dropped, prompts.empty, prompts.needed) == (0, 0, 2, 2)
    told = "2 of 4 prompts (0 cut, 0 dropped, 2 left out as the tokenizer makes no tokens of them: 50.0 %)"
    assert prompts.told("prompts") == told
    assert counted(prompts, "prompts", prompts).endswith(f", {told.replace('prompts', 'held out')}")
    assert shown_rows(prompts, tokenizer(), 1, [EMPTY]) == ["empty, row 2: the tokenizer makes no tokens of it"]
    assert prompts.warnings("--max_prompt_seq_len", 8, overlong) == []


def test_a_prompt_of_the_opening_tokens_alone_is_one():
    assert list(Prompts([{"prompt": UNSEEN}, {"prompt": "<s>"}], tokenizer("<s>"), 8)) == [[BOS], [BOS]]


def test_data_without_any_tokens_are_refused_with_the_place(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "\\u200b"}\n' * 2)
    with pytest.raises(
        UserError, match=r"makes no tokens of any of the 2 rows, from .*prompts.jsonl, line 1 on\. Give"
    ):
        Prompts(load_rows(str(path), PROMPTS, tokenizer(), phase=3, seed=0)[0], tokenizer(), 8)
    with pytest.raises(UserError, match="makes no tokens of any of the 1 rows, from row 1 on"):
        SFTExamples([{"text": UNSEEN}], tokenizer(), 8)
    with pytest.raises(UserError, match="prompt 2, '\\\\u200b': the tokenizer makes no tokens of it"):
        prompt_batch(["a", UNSEEN], tokenizer())


def test_texts_and_responses_without_tokens():
    rows = [
        {"prompt": UNSEEN, "response": "a"},  # as a text that has no prompt: what is predicted is EOS
        {"prompt": "a", "response": UNSEEN},  # an answer of no words, which ends at once
        {"prompt": UNSEEN, "response": UNSEEN},
        {"text": UNSEEN},
        {"text": "a b"},
    ]
    texts = SFTExamples(rows, tokenizer(), 8)
    assert [example.token_ids for example in texts] == [[10, EOS], [10, EOS], [10, 11, EOS]]
    assert (texts.dropped, texts.empty) == (0, 2)
    assert [texts.fit(row).kind for row in rows] == ["whole", "whole", "empty", "empty", "whole"]


def test_pairs_without_tokens():
    rows = [
        {"prompt": UNSEEN, "chosen": "a", "rejected": "b"},
        {"prompt": "a", "chosen": UNSEEN, "rejected": "b"},
        {"prompt": UNSEEN, "chosen": UNSEEN, "rejected": "b"},
        {"prompt": "a", "chosen": UNSEEN, "rejected": UNSEEN * 2},  # other texts, the same ids
    ]
    pairs = PairExamples(rows, tokenizer(), 8)
    assert list(pairs) == [([10, EOS], [11, EOS]), ([10, EOS], [10, 11, EOS]), ([EOS], [11, EOS])]
    assert (pairs.equal, pairs.dropped, pairs.empty) == (1, 0, 0)
