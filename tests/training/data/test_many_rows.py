"""What keeps memory flat and time short with millions of rows gives what a passage row by row gives."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from tests.training.data.tiny_tokenizers import BOS, EOS, merging_tokenizer, word_tokenizer
from training.data import tokens
from training.data.examples import PairExamples, Prompts, SFTExamples, _enough
from training.data.files import read_records
from training.data.forms import PROMPTS
from training.data.rows import load_rows
from training.data.tables import KnownRows, NotHandedOver, Progress, recorded, repeated


@pytest.mark.parametrize(
    "content, numbers",
    [
        (b"", []),
        (b"\n", []),
        (b"5\n6\n", [("line 1", 5), ("line 2", 6)]),
        (b"5\n\n \t\r\n 6\n7", [("line 1", 5), ("line 4", 6), ("line 5", 7)]),  # lines 2 and 3 are blank
        (b"\r\n  \n 5", [("line 3", 5)]),
    ],
)
def test_blank_lines_are_passed_over_and_counted(tmp_path, content, numbers):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    records = read_records(path)
    assert [records[number] for number in range(len(records))] == [(f"{path}, {line}", n) for line, n in numbers]
    with pytest.raises(IndexError):
        records[len(numbers)]


def test_a_column_of_dictionary_codes_in_parquet(tmp_path):
    kinds = pyarrow.array(["x", "y", "x", "z", "z"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": list("abcde"), "kind": kinds}), tmp_path / "rows.parquet")
    records = read_records(tmp_path / "rows.parquet")
    assert [records[number][1] for number in range(5)] == [
        {"text": text, "kind": kind} for text, kind in zip("abcde", "xyxzz")
    ]


@pytest.mark.parametrize("together", [1, 2, 1000])
def test_texts_that_are_encoded_together_have_the_ids_that_they_have_alone(monkeypatch, together):
    monkeypatch.setattr(tokens, "ROWS", together)
    prompts = Prompts([{"prompt": text} for text in ("a b", "c", "a b", "d e f", "<s> c")], word_tokenizer("<s>"), 3)
    assert list(prompts) == [[BOS, 10, 11], [BOS, 12], [BOS, 10, 11], [BOS, 14, 15], [BOS, 12]]
    assert (prompts.cut, prompts.needed, prompts.noted) == (1, 4, {"whole": [0, 1, 2], "cut": [3]})

    # "a" + "b" would be one token: the response is encoded behind a newline, and alone where that merges, too
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "ab"}, {"text": "cab"}]
    texts = SFTExamples(rows, merging_tokenizer(), 9)
    assert [tuple(example) for example in texts] == [([11, 12, EOS], 1), ([13, 14, EOS], 1), ([13, 14, EOS], 1)]

    pairs = PairExamples([{"prompt": "c", "chosen": "ab", "rejected": "a"}] * 3, merging_tokenizer(), 9)
    assert list(pairs) == [([13, 14, EOS], [13, 11, EOS])] * 3


def test_a_tokenizer_is_given_many_texts_at_once(monkeypatch):
    monkeypatch.setattr(tokens, "ROWS", 4)
    monkeypatch.setattr(tokens, "CHARACTERS", 8)
    tokenizer, asked = word_tokenizer(), []
    encode = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, text, **how: asked.append(text) or encode(self, text, **how)
    )
    assert list(Prompts([{"prompt": text} for text in (*"abcdea", "a b c d e", "b")], tokenizer, 9))[6:] == [
        [10, 11, 12, 13, 14],
        [11],
    ]
    assert [text for text in asked if isinstance(text, list)] == [["a", "b", "c", "d"], ["e", "a", "a b c d e"], ["b"]]
    assert not {*"abcde"} & {text for text in asked if isinstance(text, str)}


def test_the_length_that_fits_most():
    assert [_enough(counts) for counts in ({}, {7: 1}, {1: 10, 2: 9, 30: 1}, {30: 2, 2: 9, 1: 9})] == [0, 7, 2, 30]


def test_a_line_says_how_far_it_is(capsys):
    times = iter([0.0, *[5.0] * 3, 20.0, 20.0, 20.0, 21.0])
    progress = Progress(10_000, "tokenising", clock=lambda: next(times))
    assert sum(progress.over(range(5_000))) == 12_497_500
    assert capsys.readouterr().err == "tokenising: 4,000 of 10,000 rows (40%), 200 rows/s, 0:00:30 left\n"


def test_other_ranks_of_a_node_read_nothing_but_the_cache(tmp_path):
    data, cache = tmp_path / "prompts.jsonl", tmp_path / "cache"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b c", "d", "e")))

    def load() -> tuple:
        parts = load_rows(str(data), PROMPTS, word_tokenizer(), phase=3, seed=0, held_out=2)
        prompts, held_out = (Prompts(rows, word_tokenizer(), 8, cache=cache) for rows in parts)
        return [list(prompts), list(held_out), *(rows.fingerprint for rows in parts)], type(parts[0])

    with recorded() as found:
        first, _ = load()
    data.rename(tmp_path / "away.jsonl")
    assert repeated(load, found) == (first, KnownRows)
    (tmp_path / "away.jsonl").rename(data)
    for file in cache.iterdir():
        file.unlink()
    again, kind = repeated(load, found)  # no cache: it reads for itself
    assert again == first and kind is not KnownRows


def test_tables_that_are_in_no_cache_are_not_handed_over(tmp_path):
    (tmp_path / "file").write_text("")
    for cache in (None, tmp_path / "file" / "cache"):
        with recorded() as found:
            Prompts([{"prompt": "a"}], word_tokenizer(), 8, cache=cache)
        assert not found.kept
    with pytest.raises(NotHandedOver):
        KnownRows(3, "x")[0]
