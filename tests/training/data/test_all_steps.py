"""The same rows as the examples and prompts of all three steps."""

import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from engine.models.reading import read_tokenizer
from scripts.harness.models import make_causal_lm
from tests.training.data.reading import rows_of
from tests.training.data.tiny_tokenizers import CHATML, chat_tokenizer
from training.data.examples import PairExamples, Prompts, SFTExamples, collate_pairs, collate_prompts, collate_sft
from training.data.forms import PAIRS, PROMPTS, SFT
from training.data.order import PromptOrder
from training.data.rows import load_rows
from training.data.tokens import TextEncoder, stop_token_ids

SHARED = Path(__file__).resolve().parents[4] / "shared"


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


@pytest.mark.parametrize("bos", ["<s>", None])
def test_the_template_on_the_page_works_in_all_three_steps(tmp_path, bos):
    """Its text as it stands in docs/data.md, as the file of --chat_template."""
    file, page = tmp_path / "chat.jinja", Path(__file__).parents[3] / "docs" / "data.md"
    (template,) = re.findall(r"```jinja\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    file.write_text(template)
    base = make_causal_lm(tmp_path / "base")
    tokenizer = read_tokenizer(base, "base", chat_template=str(file))
    tokenizer.bos_token = bos
    asked = [{"role": "system", "content": "w04"}, {"role": "user", "content": "w05 w06"}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("w07", "w08"))
    prompt = (bos or "") + ("<|im_start|>system\nw04</s>\n<|im_start|>user\nw05 w06</s>\n<|im_start|>assistant\n")
    sft = SFT.row("here", {"messages": asked + chosen}, tokenizer)
    assert sft == {"prompt": prompt, "response": "w07</s>"}
    pair = PAIRS.row("here", {"prompt": asked, "chosen": chosen, "rejected": rejected}, tokenizer)
    assert pair == {"prompt": prompt, "chosen": "w07</s>", "rejected": "w08</s>"}
    assert PROMPTS.row("here", {"prompt": asked}, tokenizer)["prompt"] == prompt
    ids, count = TextEncoder(tokenizer).answered(sft["prompt"], sft["response"])
    assert ids == tokenizer(tokenizer.apply_chat_template(asked + chosen, tokenize=False))["input_ids"]
    assert ids[count:] == [7, tokenizer.eos_token_id] and stop_token_ids(tokenizer, None, None) == ids[-1:]


def test_real_rows_become_batches():
    model, reviews = SHARED / "models" / "stories260K", SHARED / "data" / "reviews"
    if not (model.exists() and reviews.exists()):
        pytest.skip("no tokenizer and reviews at ../shared/models/stories260K and ../shared/data/reviews")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = {
        name: rows_of(reviews / f"{name}.jsonl", form)[:32]
        for name, form in (("sft", SFT), ("pairs", PAIRS), ("prompts", PROMPTS))
    }
    batch = collate_sft(list(SFTExamples(rows["sft"], tokenizer, 64)), tokenizer.pad_token_id)
    assert batch.sequences.shape == (32, 64) and batch.loss_mask.sum() == batch.attention_mask[:, 1:].sum()
    batch = collate_pairs(
        list(PairExamples(rows["pairs"], tokenizer, 64, overlong="cut_answer")), tokenizer.pad_token_id
    )
    shared = len(tokenizer("Review :")["input_ids"])
    assert batch.sequences.shape == (64, 64) and batch.first_difference.min() == shared
    prompts = Prompts(rows["prompts"], tokenizer, 16)
    indices, visits = PromptOrder(len(prompts), 4, seed=0).batch(0)
    batch = collate_prompts([prompts[index] for index in indices.tolist()], indices, visits, tokenizer.pad_token_id)
    assert batch.input_ids.shape == (4, 16) and not batch.samples.any()
    assert all(tokenizer.bos_token_id in prompt for prompt in batch.input_ids.tolist())
