"""Dialogues of 2 to 40 turns in all three steps, 128 tokens for prompts and 128 for answers: hardly any is dropped."""

import json
import random

import pytest

from tests.training.data.tiny_tokenizers import CHATML, chat_tokenizer, word_tokenizer
from training.data.examples import PairExamples, Prompts, SFTExamples
from training.data.forms import PAIRS, PROMPTS, SFT
from training.data.rows import load_rows

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
