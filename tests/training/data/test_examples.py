"""Texts of step 1, pairs of step 2 and prompts of step 3, and their batches, on a tokenizer whose ids are known: "a" is
10, "b" 11, and so on; the same rows, dialogues and rows without tokens in all three steps.
"""

import json
import random
import re
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers.normalizers import BertNormalizer

from engine.errors import UserError
from engine.models.config_and_tokenizer import read_tokenizer
from scripts.harness.models import make_causal_lm
from tests.training.data.tiny_tokenizers import BOS, CHATML, EOS, PAD, chat_tokenizer, word_tokenizer
from training.data.examples import (
    Pair,
    PairExamples,
    Prompts,
    SFTExample,
    SFTExamples,
    TextBlocks,
    collate_pairs,
    collate_prompts,
    collate_sft,
    prompt_batch,
)
from training.data.record_forms import PAIRS, PROMPTS, SFT
from training.data.row_selection import load_rows
from training.data.tokens import EMPTY, TextEncoder, stop_token_ids
from training.runtime.start_report import counted, shown_rows

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


def test_sft_batch():
    batch = collate_sft([SFTExample([10, 11, 12, 13, EOS], 3), SFTExample([12, PAD, EOS], 1)], pad_id=PAD)
    assert batch.sequences.tolist() == [[10, 11, 12, 13, EOS], [12, PAD, EOS, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, False, True, True], [True, True, False, False]]
    assert batch.sequences.dtype == batch.attention_mask.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool


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
    parquet.write_table(pyarrow.table({"prompt": texts, "scan": images, "n": [1, 2]}), tmp_path / "rows.parquet")
    rows = load_rows(str(tmp_path / "rows.parquet"), PROMPTS, None, phase=3, seed=0)[0]
    for _ in range(2):  # made, and found in the cache
        prompts = Prompts(rows, word_tokenizer(), 4, cache=tmp_path)
        assert list(prompts.rows) == [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
        prompts.refuse_unread(["n", "absent"], "somebody asks for")
        told = r"^somebody asks for the column scan, which is not read: it holds bytes \(of the type struct<"
        with pytest.raises(UserError, match=told):
            prompts.refuse_unread(["n", "scan"], "somebody asks for")


def test_prompt_batch_is_left_padded_and_keeps_its_visits():
    batch = collate_prompts([[10], [PAD, 12, 13]], torch.tensor([7, 3]), torch.tensor([0, 2]), pad_id=EOS)
    assert batch.input_ids.tolist() == [[EOS, EOS, 10], [PAD, 12, 13]]
    assert batch.attention_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert batch.indices.tolist() == [7, 3] and batch.samples.tolist() == [0, 2]


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


def test_each_rank_takes_its_share_of_the_texts(monkeypatch):
    monkeypatch.setattr("engine.distributed.world_size", lambda: 2)
    for rank, ids in enumerate([[[10], [11]], [[12], [13]]]):
        monkeypatch.setattr("engine.distributed.rank", lambda rank=rank: rank)
        batch = prompt_batch(["a", "b", "c", "d"], tokenizer(), visit=3)
        assert batch.input_ids.tolist() == ids and batch.samples.tolist() == [3, 3]
        assert batch.indices.tolist() == [2 * rank, 2 * rank + 1]
    with pytest.raises(UserError, match="^3 texts cannot be divided equally among 2 ranks"):
        prompt_batch(["a", "b", "c"], tokenizer())


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


COUNT = 60
WORDS = "Human: Assistant: user assistant"


def said(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, most)))


def dialogue(rng: random.Random) -> tuple[list[str], str, str]:
    """(what user and assistant say by turns, up to a question; two answers to it): 2 to 40 turns with the answer."""
    turns = [said(rng, 40) for _ in range(2 * rng.randint(1, 20) - 1)]
    return turns, said(rng, 120), said(rng, 120)


def as_texts(turns: list[str], chosen: str, rejected: str) -> dict:
    marks = ("\n\nHuman: ", "\n\nAssistant: ")
    asked = "".join(marks[number % 2] + turn for number, turn in enumerate(turns)) + marks[1]
    return {"chosen": asked + chosen, "rejected": asked + rejected}


def as_messages(turns: list[str], chosen: str, rejected: str) -> dict:
    asked = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
    return {
        name: [*asked, {"role": "assistant", "content": answer}]
        for name, answer in (("chosen", chosen), ("rejected", rejected))
    }


@pytest.fixture(scope="module", params=["texts", "messages"])
def data(request, tmp_path_factory):
    """(tokenizer, rows of all steps) of such dialogues as texts and as messages."""
    rng, path = random.Random(1), tmp_path_factory.mktemp(request.param) / "dialogues.jsonl"
    made, tokenizer = {
        "texts": (as_texts, word_tokenizer("<s>", words=WORDS)),
        "messages": (as_messages, chat_tokenizer(CHATML, words=WORDS)),
    }[request.param]
    path.write_text("".join(json.dumps(made(*dialogue(rng))) + "\n" for _ in range(COUNT)))
    return tokenizer, [
        list(load_rows(str(path), form, tokenizer, phase=1, seed=0)[0]) for form in (SFT, PAIRS, PROMPTS)
    ]


def in_all_steps(tokenizer, rows: list[list[dict]], overlong: str) -> list:
    return [
        SFTExamples(rows[0], tokenizer, 256, overlong=overlong),
        PairExamples(rows[1], tokenizer, 256, overlong=overlong),
        Prompts(rows[2], tokenizer, 128, overlong),
    ]


def test_at_most_5_percent_are_dropped_in_any_step(data):
    tokenizer, rows = data
    steps = in_all_steps(tokenizer, rows, "cut_prompt")
    for kept in steps:
        assert kept.dropped + kept.equal <= 0.05 * COUNT and kept.cut > 0.4 * COUNT
    assert all(step.dropped > 0.4 * COUNT for step in in_all_steps(tokenizer, rows, "cut_answer"))


def test_every_answer_is_whole_and_every_prompt_begins_at_a_users_turn(data):
    tokenizer, rows = data
    texts, pairs, prompts = in_all_steps(tokenizer, rows, "cut_prompt")
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    marks = tokenizer.convert_tokens_to_ids(["Human:", "user"])
    for ids in [ids for ids, _ in texts] + [ids for pair in pairs for ids in pair]:
        assert len(ids) <= 256 and ids[-1] in ends
    for ids in [*prompts, *(ids for ids, _ in texts)]:
        assert ids[1] in marks  # behind <s>, or <|im_start|>
    assert all(len(ids) <= 128 for ids in prompts)


def test_a_pairs_sides_have_the_same_prompt_and_their_own_answers(data):
    tokenizer, rows = data
    _, pairs, _ = in_all_steps(tokenizer, rows, "cut_prompt")
    for pair, row in zip(pairs, rows[1], strict=True):
        answers = [len(tokenizer(row[side], add_special_tokens=False)["input_ids"]) for side in ("chosen", "rejected")]
        ended = 0 if "<|im_end|>" in row["chosen"] else 1
        prompts = [ids[: len(ids) - count - ended] for ids, count in zip(pair, answers)]
        assert prompts[0] == prompts[1]


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
