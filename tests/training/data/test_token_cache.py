"""Tokenised examples that are kept: found again, never stale, never half; and what keeps memory flat and time short
with millions of rows gives what a passage row by row gives.
"""

import json
import os
import resource
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import BOS, EOS, chat_tokenizer, merging_tokenizer, word_tokenizer
from training.data import tokens
from training.data.examples import PairExamples, Prompts, SFTExamples, TextBlocks, _enough
from training.data.files import read_records
from training.data.record_forms import PROMPTS, SFT
from training.data.row_selection import load_rows
from training.data.token_cache import (
    KnownRows,
    MadeTable,
    NotHandedOver,
    Progress,
    cache_folder,
    cache_key,
    cached_table,
    read_table,
    recorded,
    repeated,
    write_table,
)

SCHEMA = pyarrow.schema({"ids": pyarrow.large_list(pyarrow.int32()), "n": pyarrow.int32()})


def made(count: int = 3) -> MadeTable:
    def examples(counts: Counter):
        for number in range(count):
            counts["truncated"] += number % 2
            yield list(range(number % 9)), number

    return MadeTable(SCHEMA, examples)


def table(count: int = 3) -> pyarrow.Table:
    """The same, made by hand."""
    return pyarrow.table([[list(range(n % 9)) for n in range(count)], list(range(count))], schema=SCHEMA)


def only_file(folder) -> Path:
    (file,) = folder.iterdir()
    return file


def counting(rows) -> list:
    """The rows as a list that counts in `reads` how often it is gone through."""

    class Counted(list):
        fingerprint, reads = json.dumps(rows), 0

        def __iter__(self):
            Counted.reads += 1
            return super().__iter__()

    return Counted(rows)


@pytest.mark.parametrize(
    "make, rows",
    [
        (
            lambda *args, **kept: SFTExamples(*args, 5, **kept),
            [{"prompt": "a b", "response": " c"}, {"text": "a b c d e"}],
        ),
        (
            lambda *args, **kept: PairExamples(*args, 3, **kept),
            [{"prompt": "a", "chosen": " b c", "rejected": " d"}] * 2
            + [{"prompt": "a", "chosen": " b", "rejected": " b"}],
        ),
        (
            lambda *args, **kept: Prompts(*args, 2, overlong="drop", **kept),
            [{"prompt": "a b", "answer": [1, None]}, {"prompt": "a b c"}, {"prompt": "\u00e9", "x": "\ud800"}],
        ),
        (lambda *args, **kept: TextBlocks(*args, 3, **kept), [{"text": "a b c d"}, {"text": "e f"}]),
    ],
)
def test_a_second_run_finds_what_the_first_one_made(tmp_path, make, rows):
    rows = counting(rows)
    fresh, first, second = (make(rows, word_tokenizer(), cache=folder) for folder in (None, tmp_path, tmp_path))
    assert type(rows).reads == 2 and len(list(tmp_path.iterdir())) == 1
    assert list(fresh) == list(first) == list(second)
    for name in {"cut", "dropped", "equal", "needed", "noted"} & set(vars(fresh)):
        assert getattr(fresh, name) == getattr(second, name)
    if isinstance(fresh, Prompts):
        assert list(second.rows) == [rows[0], rows[2]] and (second.cut, second.dropped) == (0, 1)


def test_whatever_matters_makes_another_file(tmp_path):
    rows = [{"text": "a b"}]
    settings = {"kind": "sft", "max_length": 5}
    word, bos = word_tokenizer(), word_tokenizer("<s>")
    chat, other_chat = chat_tokenizer("{{ messages }}"), chat_tokenizer("{{ messages }} ")
    keys = [
        cache_key(rows, word, **settings),
        cache_key([{"text": "a  b"}], word, **settings),
        cache_key(rows, bos, **settings),
        cache_key(rows, chat, **settings),
        cache_key(rows, other_chat, **settings),
        cache_key(rows, word, kind="sft", max_length=6),
        cache_key(rows, word, kind="prompts", max_length=5),
    ]
    assert len(set(keys)) == len(keys)
    assert cache_key(list(rows), word_tokenizer(), **dict(reversed(settings.items()))) == keys[0]
    word("a", padding="max_length", max_length=4, truncation=True)  # leaves traces in the tokenizer
    assert cache_key(rows, word, **settings) == keys[0]


def test_an_edited_file_is_never_served_stale(tmp_path):
    path, folder = tmp_path / "a.jsonl", tmp_path / "cache"

    def ids() -> list:
        rows, _ = load_rows(str(path), SFT, word_tokenizer(), phase=1, seed=0)
        return [example.token_ids for example in SFTExamples(rows, word_tokenizer(), 8, cache=folder)]

    path.write_text('{"text": "a b"}\n')
    stamp = path.stat()
    assert ids() == [[10, 11, EOS]]
    path.write_text('{"text": "a c"}\n')
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same name, size and time: the content alone tells
    assert ids() == [[10, 12, EOS]]
    assert len(list(folder.iterdir())) == 2


def test_a_table_is_the_same_on_disk(tmp_path):
    write_table(made(25_000), tmp_path / "kept.arrow")  # several batches
    found = read_table(tmp_path / "kept.arrow")
    assert found.equals(table(25_000)) and found.schema.metadata == {b"truncated": b"12500"}
    assert found["ids"][24_999].values.to_pylist() == [0, 1, 2, 3, 4, 5]  # 24,999 is 9 * 2,777 + 6
    assert [file.name for file in tmp_path.iterdir()] == ["kept.arrow"]


@pytest.mark.parametrize("damage", ["empty", "header", "half", "last byte", "one bit", "text", "longer"])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    def kept():
        return cached_table(made(), tmp_path, [], word_tokenizer())

    kept()
    path = only_file(tmp_path)
    intact = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "header": intact[:40],
            "half": intact[: len(intact) // 2],
            "last byte": intact[:-1],
            "one bit": intact[:200] + bytes([intact[200] ^ 1]) + intact[201:],
            "text": b"no Arrow " * 99,
            "longer": intact + b"\0",
        }[damage]
    )
    assert read_table(path) is None
    assert kept().equals(table()) and path.read_bytes() == intact and only_file(tmp_path) == path


def test_one_that_was_quicker_is_kept(tmp_path):
    """While a table is being built, another process puts the same one in its place."""
    path, others = tmp_path / f"{cache_key([], word_tokenizer())}.arrow", {}

    def examples(counts):
        if not others:
            others["writing"] = True
            write_table(made(), path)
            others["written"] = path.stat().st_ino
        return made().examples(counts)

    assert cached_table(MadeTable(SCHEMA, examples), tmp_path, [], word_tokenizer()).equals(table())
    assert only_file(tmp_path).stat().st_ino == others["written"]


def test_many_writers_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: write_table(made(2_000), tmp_path / "kept.arrow"), range(24)))
    assert read_table(only_file(tmp_path)).equals(table(2_000))


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"  # not even root can make a folder in a file
    examples = SFTExamples([{"text": "a"}], word_tokenizer(), 8, cache=folder)
    assert list(examples) == [([10, EOS], 1)]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"warning: tokenised data are not kept: {folder} cannot be written (")


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    def full(*names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert cached_table(made(), tmp_path, [], word_tokenizer()).equals(table())
    assert "No space left on device" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_without_room_for_a_table_anywhere(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"file of data cannot be written \(File too large\)\. Set TMPDIR"):
            cached_table(made(200_000), tmp_path, [], word_tokenizer())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path} cannot be written (File too large)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_killed_runs_left_half_written_is_removed_after_a_day(tmp_path):
    old, young = tmp_path / "a.1.tmp", tmp_path / "b.2.tmp"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    cached_table(made(), tmp_path, [], word_tokenizer(), kind="x")
    assert not old.exists() and young.exists()


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path)]
)
def test_what_stands_in_the_place_of_a_file(tmp_path, capsys, make):
    make(tmp_path / f"{cache_key([], word_tokenizer(), kind='x')}.arrow")
    for _ in range(2):
        assert cached_table(made(), tmp_path, [], word_tokenizer(), kind="x").equals(table())
    assert "Traceback" not in capsys.readouterr().err


def test_no_room_for_temporary_files(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    tokenizer = word_tokenizer()
    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(UserError, match=r"temporary folder \(No space left on device\)\. Set TMPDIR"):
        cached_table(made(), tmp_path, [], tokenizer, kind="x")


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / "four-engine-rlhf"
    assert cache_folder("elsewhere") == Path("elsewhere")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "four-engine-rlhf"
    assert cache_folder("~/data") == tmp_path / "data"


NUMBERS_SCHEMA = pyarrow.schema({"n": pyarrow.int32()})


def numbers(count: int) -> MadeTable:
    return MadeTable(NUMBERS_SCHEMA, lambda counts: ((number,) for number in range(count)))


def test_a_process_that_is_killed_leaves_nothing_half(tmp_path):
    key = cache_key([], word_tokenizer())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:

        def endless(counts):
            for number in range(10**9):
                if number == 30_000:
                    os.write(writing, b"x")
                yield (number,)

        try:
            cached_table(MadeTable(NUMBERS_SCHEMA, endless), tmp_path, [], word_tokenizer())
        finally:
            os._exit(1)
    os.read(reading, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert [file.suffix for file in tmp_path.iterdir()] == [".tmp"]
    assert cached_table(numbers(5), tmp_path, [], word_tokenizer())["n"].to_pylist() == [0, 1, 2, 3, 4]
    assert f"{key}.arrow" in [file.name for file in tmp_path.iterdir()]


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
