"""Compressed data files: read like what is in them, and one message for each that cannot be."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import resource
import subprocess
import tempfile
import tracemalloc
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from engine.errors import UserError
from tests.training.data.reading import rows_of
from training.data import files
from training.data.files import read_records
from training.data.record_forms import SFT
from training.data.sources import open_source


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}
LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(2000)) + b"\n" + b'{"text": "last"}\n'
PARQUET = io.BytesIO()
parquet.write_table(pyarrow.table({"text": ["a", "b"]}), PARQUET)
FILES = [
    ("rows.jsonl", LINES, 2001, "line 2002", "last"),
    ("rows.json", json.dumps([{"text": "a"}, {"text": "b"}]).encode(), 2, "record 2", "b"),
    ("rows.json", b'{"text": "a"}\n{"text": "b"}\n', 2, "line 2", "b"),
    ("rows.csv", b'text\n"a\nb"\nc\n', 2, "line 4", "c"),
    ("rows.parquet", PARQUET.getvalue(), 2, "record 2", "b"),
]


def every(records) -> list:
    return [records[index] for index in range(len(records))]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("name, content, count, place, text", FILES)
def test_a_compressed_file_is_read_like_what_is_in_it(tmp_path, ending, name, content, count, place, text):
    (tmp_path / name).write_bytes(content)
    path = tmp_path / (name + ending)
    path.write_bytes(COMPRESS[ending](content))
    found, plain = open_source(str(path)).training[0], read_records(tmp_path / name)
    assert len(found) == count and found[count - 1] == (f"{path}, {place}", {"text": text})
    assert [record for _, record in every(found)] == [record for _, record in every(plain)]
    assert found.fingerprint == plain.fingerprint  # so that either can be gone on with, and both are not given at once
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([name, path.name])  # nothing beside the data


@pytest.mark.parametrize("ending", COMPRESS)
def test_members_one_behind_the_other_are_one_file(tmp_path, ending):
    path = tmp_path / f"rows.jsonl{ending}"
    path.write_bytes(b"".join(COMPRESS[ending](part) for part in (b'{"text": "a"}\n{"te', b"", b'xt": "b"}\n')))
    assert every(read_records(path))[1] == (f"{path}, line 2", {"text": "b"})


NOISE = random.Random(0).randbytes(3000)  # so that it is stored, and a damaged byte is data


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize(
    "damage, told",
    [
        (lambda content: content[:-5], r"cannot be decompressed \(Truncated compressed stream\)\. Was .* cut off\?"),
        (lambda content: content[:9], r"cannot be decompressed \(Truncated compressed stream\)"),
        (lambda content: content + content[:9], r"cannot be decompressed \(Truncated compressed stream\)"),
        (lambda content: content + b"oops, some more", "cannot be decompressed"),
        (lambda _: LINES, "cannot be decompressed .* or take .(gz|bz2|xz|zst) off its name if it is not compressed"),
        (lambda _: b"\0" * 2000, "cannot be decompressed"),
        (lambda _: pyarrow.compress(LINES, "brotli", asbytes=True), "cannot be decompressed"),
        (lambda _: b"", "found no records"),
    ],
)
def test_what_cannot_be_decompressed(tmp_path, ending, damage, told):
    path = tmp_path / f"rows.jsonl{ending}"
    path.write_bytes(damage(COMPRESS[ending](LINES + NOISE)))
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: {told}") as caught:
        rows_of(path, SFT)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < len(str(path)) + 300


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_small_file_that_becomes_a_huge_one_is_refused_before_it_is(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(files, "ALWAYS_ALLOWED", 2**16)
    written, temporary_file = [], tempfile.TemporaryFile

    def counted():
        file = temporary_file()
        written.append(os.dup(file.fileno()))
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", counted)
    path = tmp_path / f"rows.jsonl{ending}"
    content = COMPRESS[ending](b'{"text": "' + b" " * 30_000_000)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"becomes more than 200 times as large .* decompress it and give"):
        open_source(str(tmp_path))  # a folder: no other library decompresses it either
    assert os.fstat(written[0]).st_size <= 200 * len(content)
    os.close(written[0])


BIG = "a" * 2**16


def repeated(times: int) -> pyarrow.Array:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * times, pyarrow.int32()), [BIG])


@pytest.mark.slow
def test_a_small_parquet_file_that_becomes_a_huge_one_is_refused(tmp_path, monkeypatch):
    """However its texts are encoded, and whatever its footer says of their sizes and numbers."""
    monkeypatch.setattr(files, "ALWAYS_ALLOWED", 2**24)
    names = ("dictionary", "one_row", "prefixes", "compressed", "larger_than_told")
    paths = {name: tmp_path / f"{name}.parquet" for name in names}
    flat = pyarrow.table({"text": repeated(400)})
    one_row = pyarrow.ListArray.from_arrays(pyarrow.array([0, 3000], pyarrow.int32()), repeated(3000))
    parquet.write_table(flat, paths["dictionary"], compression="zstd", store_schema=False)
    parquet.write_table(pyarrow.table({"text": one_row}), paths["one_row"], compression="zstd", store_schema=False)
    texts = pyarrow.table({"text": [BIG] * 300})
    plain = {"use_dictionary": False, "compression": "zstd", "write_statistics": False}
    parquet.write_table(texts, paths["prefixes"], column_encoding={"text": "DELTA_BYTE_ARRAY"}, **plain)
    parquet.write_table(texts, paths["compressed"], **plain)
    told = parquet.ParquetFile(paths["compressed"]).metadata.row_group(0).column(0).total_uncompressed_size
    said, smaller = _varint(told), _varint(2**23)  # as many bytes
    content = paths["compressed"].read_bytes()
    assert len(said) == len(smaller) and content.count(said) >= 2
    paths["larger_than_told"].write_bytes(content.replace(said, smaller))
    for path in paths.values():
        assert path.stat().st_size < 100_000
        with pytest.raises(UserError, match=rf"{path.name}: becomes more than 16 MB when it is decoded, .* as \.jsonl"):
            read_records(path)


def _varint(number: int) -> bytes:
    """A number as a Parquet footer has it."""
    number, parts = 2 * number, []
    while number:
        number, part = number >> 7, number & 127
        parts.append(part | (128 if number else 0))
    return bytes(parts)


def test_equal_labels_and_repetitive_chats_are_read(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["positive"] * 1_000_000}), path, compression="zstd")
    assert path.stat().st_size < 5_000  # 2,000 times as small as what is in it
    records = read_records(path)
    assert len(records) == 1_000_000 and records[999_999][1] == {"text": "positive"}
    chats = [[{"role": "user", "content": f"{number} " + "very long " * 3_000}] for number in range(2_000)]
    parquet.write_table(pyarrow.table({"messages": chats}), path, compression="zstd")
    assert read_records(path)[1_999][1] == {"messages": chats[-1]}


@pytest.mark.parametrize(
    "name, content",
    [
        ("rows.csv", b",".join(b"n%d" % number for number in range(2000)) + b"\n" + b"a\n" * 1000),
        ("rows.jsonl", b"\n" * 200_000 + b"{}"),
    ],
)
def test_small_records_take_little_more_memory_than_their_text(tmp_path, name, content):
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    tracemalloc.start()
    try:
        records = read_records(tmp_path / f"{name}.gz")
        assert tracemalloc.get_traced_memory()[1] < 20 * len(content) + 2**20  # for parts of the files
    finally:
        tracemalloc.stop()
    assert records[len(records) - 1][1] in ({"n0": "a"}, {"a": None, "b": None}, 0, {})


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_one_record_of_very_many_lists_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"text": [' + b"[]," * 300_000 + b"[]]}")
    with pytest.raises(UserError, match=rf"{name}.*: found more than 100,000 lists and objects"):
        rows_of(tmp_path / name, SFT)


def test_a_table_is_decoded_by_this_process_with_a_limit_of_memory(tmp_path, monkeypatch):
    path, limits, built = tmp_path / "a.parquet", resource.getrlimit(resource.RLIMIT_AS), []
    schema = parquet.ParquetFile.schema_arrow
    parquet.write_table(pyarrow.table({"a": ["a"], "b": ["b"]}), path)
    counted = property(lambda source: built.append(1) or schema.fget(source))
    monkeypatch.setattr(parquet.ParquetFile, "schema_arrow", counted)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert read_records(path)[0][1] == {"a": "a", "b": "b"}
    assert len(built) == 1  # each access takes milliseconds if there are thousands of columns
    told = pytest.raises(UserError, match="needs more memory than data do")
    with path.open("rb") as file, told, files._limited(path, file, 2**40):
        bytearray(4 * 2**30)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_saved_set_with_compressed_batches_that_become_huge_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ALWAYS_ALLOWED", 2**24)
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path)
    path = tmp_path / "data-00000-of-00001.arrow"
    schema = pyarrow.ipc.open_stream(path).schema
    batch = pyarrow.record_batch([pyarrow.array([BIG] * 100)], schema=schema)
    with pyarrow.ipc.new_stream(path, schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for _ in range(4):
            writer.write_batch(batch)
    assert path.stat().st_size < 100_000
    with pytest.raises(UserError, match=rf"{path.name}: becomes more than 16 MB when it is decoded"):
        open_source(str(tmp_path))


def test_without_room_for_the_content(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(LINES))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: Path("/dev/full").open("wb"))  # noqa: SIM115
    with pytest.raises(
        UserError, match=r"a temporary file of data cannot be written \(No space left on device\)\. Set TMP"
    ):
        read_records(path)


def test_without_room_for_the_rows_of_a_parquet_file(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["a" * 1000] * 100}), tmp_path / "rows.parquet")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"temporary file of data cannot be written \(File too large\)"):
            read_records(tmp_path / "rows.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name, ending", [("rows.gz", ".gz"), ("rows.txt.gz", ".txt.gz")])
def test_other_endings_are_told_which_there_are(tmp_path, name, ending):
    (tmp_path / name).write_bytes(gzip.compress(LINES))
    with pytest.raises(
        UserError, match=rf"{name}: found the ending '{ending}'; .*\.parquet, with \.gz, \.bz2, \.xz, \.zst behind"
    ):
        read_records(tmp_path / name)


@pytest.mark.parametrize("ending", COMPRESS)
def test_endings_in_capitals_are_endings(tmp_path, ending):
    path = tmp_path / f"ROWS.JSONL{ending.upper()}"
    path.write_bytes(COMPRESS[ending](LINES))
    assert len(read_records(path)) == 2001
    (tmp_path / "rows.Csv").write_text("text\na\n")
    assert read_records(tmp_path / "rows.Csv")[0][1] == {"text": "a"}


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_data_under_a_plain_name_or_twice_are_called_so(tmp_path, ending):
    content, kind = COMPRESS[ending](LINES), files.COMPRESSIONS[ending]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"rows.jsonl: holds {kind} data\. Call it rows.jsonl\{ending}, or decompress"):
        read_records(path)
    twice = tmp_path / "rows.jsonl.gz"
    twice.write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=rf"rows.jsonl.gz: holds {kind} data inside of gzip data\. Decompress it once"):
        read_records(twice)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv.zst", "rows.parquet"])
@pytest.mark.parametrize("as_folder", [False, True])
def test_a_git_lfs_pointer_is_called_one(tmp_path, name, as_folder):
    (tmp_path / name).write_bytes(POINTER)
    told = f"{tmp_path}/{name} is a Git LFS pointer: .* Run `git lfs pull` in {tmp_path}\\.$"
    with pytest.raises(UserError, match=f"^{told}"):
        open_source(str(tmp_path if as_folder else tmp_path / name))


@pytest.mark.parametrize("name", ["state.json", "data-00000-of-00001.arrow"])
def test_a_git_lfs_pointer_in_a_folder_that_a_library_reads_is_called_one(tmp_path, name):
    (tmp_path / name).write_bytes(POINTER)
    if name.endswith(".arrow"):
        (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match=rf"{name} is a Git LFS pointer: .* Run `git lfs pull` in"):
        open_source(str(tmp_path))
