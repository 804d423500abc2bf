"""Prompts of step 3 and their batches, on a tokenizer whose ids are known: "a" is 10, "b" 11, "c" 12, "d" 13."""

import pyarrow
import pytest
import torch
from pyarrow import parquet

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import BOS, EOS, PAD, word_tokenizer
from training.data.examples import Prompts, collate_prompts
from training.data.forms import PROMPTS
from training.data.rows import load_rows


def test_an_unknown_way_with_long_prompts_is_refused():
    with pytest.raises(UserError, match="overlong is 'cut'; choose 'cut_prompt', 'cut_answer', 'drop'"):
        Prompts([{"prompt": "a"}], word_tokenizer(), 4, overlong="cut")


def test_long_prompts_are_cut_on_the_left_behind_the_bos():
    rows = [{"prompt": "a b c d"}, {"prompt": "a b c", "stars": 5}]
    prompts = Prompts(rows, word_tokenizer("<s>"), max_prompt_length=4, overlong="cut_prompt")
    assert list(prompts) == [[BOS, 11, 12, 13], [BOS, 10, 11, 12]]
    assert (prompts.cut, prompts.dropped, list(prompts.rows)) == (1, 0, rows)
    assert list(Prompts(rows, word_tokenizer(), 3)) == [[11, 12, 13], [10, 11, 12]]


@pytest.mark.parametrize("overlong", ["drop", "cut_answer"])
def test_long_prompts_may_be_left_out(overlong):
    rows = [{"prompt": "a b c d"}, {"prompt": "a b c", "stars": 5}]
    prompts = Prompts(rows, word_tokenizer("<s>"), max_prompt_length=4, overlong=overlong)
    assert list(prompts) == [[BOS, 10, 11, 12]]
    assert (prompts.cut, prompts.dropped, list(prompts.rows)) == (0, 1, rows[1:])
    with pytest.raises(UserError, match="none of the 2 prompts has at most 3 tokens"):
        Prompts(rows, word_tokenizer("<s>"), max_prompt_length=3, overlong="drop")
    with pytest.raises(UserError, match="max_prompt_length is 1; it needs to be at least 2"):
        Prompts(rows, word_tokenizer("<s>"), max_prompt_length=1)


def test_queries_may_start_and_end_at_tokens():
    # Behind the first 11 (b), at most 4 tokens with the BOS, up to the last 13 (d) among those.
    rows = [{"prompt": "a b c d d a"}, {"prompt": "c d a"}, {"prompt": "a b c a d"}, {"prompt": "b d d b"}]
    prompts = Prompts(rows, word_tokenizer("<s>"), max_prompt_length=4, query_start=11, query_end=13)
    assert list(prompts) == [[BOS, 12, 13, 13], [BOS, 12, 10, 13], [BOS, 13, 13]]
    assert (prompts.dropped, prompts.cut, list(prompts.rows)) == (1, 0, [rows[0], rows[2], rows[3]])
    with pytest.raises(UserError, match="none of the 1 prompts has the dialect's query_start and query_end within 4"):
        Prompts(rows[1:2], word_tokenizer("<s>"), max_prompt_length=4, query_start=11, query_end=13)


def test_rows_are_without_the_columns_that_were_not_read(tmp_path):
    texts, images = pyarrow.array(["a", "b"]), pyarrow.array([{"bytes": b"x"}, None])
    parquet.write_table(pyarrow.table({"prompt": texts, "image": images, "n": [1, 2]}), tmp_path / "rows.parquet")
    rows = load_rows(str(tmp_path / "rows.parquet"), PROMPTS, None, phase=3, seed=0)[0]
    for _ in range(2):  # made, and found in the cache
        prompts = Prompts(rows, word_tokenizer(), 4, cache=tmp_path)
        assert list(prompts.rows) == [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
        prompts.refuse_unread(["n", "absent"], "somebody asks for")
        told = r"^somebody asks for the column image, which is not read: it holds bytes \(of the type struct<"
        with pytest.raises(UserError, match=told):
            prompts.refuse_unread(["n", "image"], "somebody asks for")


def test_prompt_batch_is_left_padded_and_keeps_its_visits():
    batch = collate_prompts([[10], [PAD, 12, 13]], torch.tensor([7, 3]), torch.tensor([0, 2]), pad_id=EOS)
    assert batch.input_ids.tolist() == [[EOS, EOS, 10], [PAD, 12, 13]]
    assert batch.attention_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert batch.indices.tolist() == [7, 3] and batch.samples.tolist() == [0, 2]
