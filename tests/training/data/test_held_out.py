"""Which rows are held out where some will be dropped for their length: as many as asked for, of those that stay."""

import json

import numpy as np
import pytest

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import word_tokenizer
from training.data.examples import SFTExamples, sft_fit
from training.data.forms import SFT
from training.data.rows import load_rows

SEED = 7
LONG = "a b c d e f g h"  # 9 tokens with EOS


@pytest.fixture
def data(tmp_path):
    """Writes rows, of which each third one is short, into a file; returns its path."""

    def write(name: str, count: int) -> str:
        rows = [{"text": "a b" if number % 3 == 0 else LONG, "number": number} for number in range(count)]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def load(path: str, asked: list | None = None, **options):
    """(training rows, held-out rows), counted without those of more than 5 tokens."""
    fit = sft_fit(word_tokenizer(), 5, overlong="drop")

    def keeps(row: dict) -> bool:
        if asked is not None:
            asked.append(row)
        return not fit(row).reason

    return load_rows(path, SFT, word_tokenizer(), phase=1, seed=SEED, keeps=keeps, **options)


def lines(rows) -> list[int]:
    """The numbers of the rows' records."""
    return rows.places[:, 1].tolist()


def examples(rows) -> SFTExamples:
    return SFTExamples(rows, word_tokenizer(), 5, overlong="drop")


@pytest.mark.parametrize("held_out, count", [(4, 4), (9, 9)])
def test_held_out_rows_are_counted_without_those_that_are_dropped(data, held_out, count):
    path = data("rows.jsonl", 30)
    training, apart = load(path, held_out=held_out)
    assert len(apart) == count == len(examples(apart)) and examples(apart).dropped == 0
    assert sorted(lines(training) + lines(apart)) == list(range(30))
    drawn = [number for number in np.random.default_rng(SEED).permutation(30).tolist() if number % 3 == 0]
    assert lines(apart) == sorted(drawn[:count])
    kept = examples(training)
    assert (len(kept), kept.dropped) == (10 - count, 20)
    again = load(path, held_out=held_out)
    assert [rows.fingerprint for rows in again] == [training.fingerprint, apart.fingerprint]


@pytest.mark.parametrize("held_out", [0.02, 0.15, 0.2, 0.5, 0.9])
def test_a_fraction_is_one_of_those_that_stay(data, held_out):
    training, apart = load(data("rows.jsonl", 300), held_out=held_out)
    order = np.random.default_rng(SEED).permutation(300).tolist()
    stay = [number for number in order[: round(300 * held_out)] if number % 3 == 0]
    assert lines(apart) == sorted(stay) and abs(len(apart) / 100 - held_out) < 0.05
    assert sorted(lines(training) + lines(apart)) == list(range(300))


def test_a_fraction_of_few_that_stay_is_at_least_one(data, tmp_path):
    path, order = tmp_path / "few.jsonl", np.random.default_rng(SEED).permutation(40).tolist()
    for short in (order[-2:], order[1:3], order[-1:]):
        path.write_text("".join(json.dumps({"text": "a" if n in short else LONG}) + "\n" for n in range(40)))
        if len(short) == 2:
            assert lines(load(str(path), held_out=0.05)[1]) == short[:1]
        else:  # it would be held out, and nothing left
            with pytest.raises(UserError, match="cannot hold out 0.05 of 1 rows, which are all that are not left out,"):
                load(str(path), held_out=0.05)


def test_rows_are_asked_for_only_until_there_are_enough(data):
    path, asked = data("rows.jsonl", 300), []
    load(path, asked, held_out=4)
    order = np.random.default_rng(SEED).permutation(300).tolist()
    # Up to the fifth that stays, for one has to be left to train on.
    assert len(asked) == [number for number, row in enumerate(order, start=1) if row % 3 == 0][4]


def test_without_lengths_the_same_rows_are_held_out_as_ever(data):
    path = data("rows.jsonl", 30)
    usual = load_rows(path, SFT, word_tokenizer(), phase=1, seed=SEED, held_out=4)
    all_kept = load_rows(path, SFT, word_tokenizer(), phase=1, seed=SEED, held_out=4, keeps=lambda row: True)
    assert [rows.fingerprint for rows in usual] == [rows.fingerprint for rows in all_kept]
    assert lines(usual[1]) == sorted(np.random.default_rng(SEED).permutation(30)[:4].tolist())


def test_too_few_that_stay_are_told(data):
    with pytest.raises(UserError, match=r"cannot hold out 10 of 10 rows, which are all that are not left out, .*of 30"):
        load(data("rows.jsonl", 30), held_out=10)
    assert len(load(data("rows.jsonl", 30), held_out=9)[1]) == 9


@pytest.mark.parametrize("limit, count", [(None, 21), (4, 4), (7, 7), (20, 7), (30, 7)])
def test_of_a_test_split_under_a_limit_those_that_stay_are_counted(data, tmp_path, limit, count):
    data("set/train.jsonl", 30), data("set/test.jsonl", 21)
    training, apart = load(str(tmp_path / "set"), held_out=5, eval_limit=limit)
    assert len(training) == 30 and len(apart) == count
    assert limit is None or examples(apart).dropped == 0
    assert lines(apart) == sorted(set(lines(apart)))


def test_what_is_wrong_with_all_records_is_told_of_the_first(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n' * 40)
    with pytest.raises(UserError, match="rows.jsonl, line 1: found the columns: question"):
        load_rows(str(path), SFT, word_tokenizer(), phase=1, seed=SEED, held_out=4, keeps=lambda row: True)
