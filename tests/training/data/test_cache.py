"""Tokenised examples that are kept: found again, never stale, never half, whoever writes them at the same time."""

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pytest

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import EOS, chat_tokenizer, word_tokenizer
from training.data import tables
from training.data.examples import PairExamples, Prompts, SFTExamples, TextBlocks
from training.data.forms import SFT
from training.data.rows import load_rows
from training.data.tables import MadeTable, cache_folder, cache_key, cached_table, read_table, write_table

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


@pytest.mark.parametrize(
    "make, name",
    [
        (
            lambda folder: SFTExamples([{"prompt": "a b", "response": " c"}], word_tokenizer(), 8, cache=folder),
            "8e150493311555354f54f9c1e5ecdb510d5f0a33a54e4b072ad4a9f2b7bb3c93",
        ),
        (
            lambda folder: PairExamples(
                [{"prompt": "a b", "chosen": " b", "rejected": " c"}], word_tokenizer(), 8, cache=folder
            ),
            "54792db590a6ceb7a86d4d94de0b8f928b8c9ea45ad9730eb89e27f3217ca582",
        ),
        (
            lambda folder: Prompts([{"prompt": "a b"}], word_tokenizer(), 8, cache=folder),
            "a29db22e1781ca8c1d4bc02d46746d0994539be291ea899b4a826b8d962127ae",
        ),
        (
            lambda folder: Prompts([{"prompt": "a b"}], word_tokenizer(), 8, "drop", folder, query_start=10),
            "59c1da797c9d1fb2b02587bcb9ab4904f88fa001ec038a0ee888d964d7ab96c7",
        ),
        (
            lambda folder: TextBlocks([{"text": "a b"}], word_tokenizer(), 2, cache=folder),
            "1db08e9e3301247ed7f8d23397cbc2ba972158e49ba1b666b40593e00431ed44",
        ),
    ],
)
def test_files_are_found_by_the_names_that_they_always_had(tmp_path, monkeypatch, make, name):
    monkeypatch.setattr(tables, "version", lambda library: "1")
    monkeypatch.setattr(tables, "tokenizer_hash", lambda tokenizer: "tokenizer")
    make(tmp_path)
    assert only_file(tmp_path).stem == name


def test_a_raised_format_makes_another_file(monkeypatch):
    before = cache_key([], word_tokenizer())
    monkeypatch.setattr(tables, "FORMAT", tables.FORMAT + 1)
    assert cache_key([], word_tokenizer()) != before


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


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    folder, start = tmp_path / "cache", tmp_path / "start"
    script = Path(__file__).with_name("build_cache.py")
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(start)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert all(worker.stdout.readline() == "ready\n" for worker in workers)
    start.touch()
    ended = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0] and all(err == "" for _, err in ended)
    assert [out for out, _ in ended] == ["20000 rows\n"] * 2
    assert len(read_table(only_file(folder))) == 20_000


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
