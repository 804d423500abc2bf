"""A table is made by one process; the others wait for it, whatever becomes of it."""

import os
import resource
import signal
import socket
import threading
import time

import pyarrow
import pytest

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import word_tokenizer
from training.data import tables
from training.data.tables import MadeTable, Unwritten, alone, cache_key, cached_table, note, write_table

SCHEMA = pyarrow.schema({"n": pyarrow.int32()})


def numbers(count: int = 3, begun: list | None = None) -> MadeTable:
    def examples(counts):
        if begun is not None:
            begun.append(count)
        return ((number,) for number in range(count))

    return MadeTable(SCHEMA, examples)


def test_others_wait_and_take_what_was_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "FIRST", 0.0)
    key, begun = cache_key([], word_tokenizer()), []
    waiting = threading.Thread(target=lambda: cached_table(numbers(3, begun), tmp_path, [], word_tokenizer()))
    with alone(tmp_path / f"{key}.lock") as held:
        assert held
        note("half of it is done")
        waiting.start()
        while "half of it" not in (said := capsys.readouterr().err):
            time.sleep(0.05)
        write_table(numbers(), tmp_path / f"{key}.arrow")
    waiting.join(60)
    assert not waiting.is_alive() and begun == []
    line = said.splitlines()[0]
    assert line.startswith("waiting for process ") and f"({tmp_path / key}.lock); half of it is done" in line
    assert [file.name for file in tmp_path.iterdir()] == [f"{key}.arrow"]


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
            cached_table(MadeTable(SCHEMA, endless), tmp_path, [], word_tokenizer())
        finally:
            os._exit(1)
    os.read(reading, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = {file.suffix for file in tmp_path.iterdir()}
    assert left == {".lock", ".tmp"}
    assert cached_table(numbers(5), tmp_path, [], word_tokenizer())["n"].to_pylist() == [0, 1, 2, 3, 4]
    assert [file.name for file in tmp_path.iterdir()] == [f"{key}.arrow"]


def test_what_another_host_writes_is_left_to_it(tmp_path, monkeypatch):
    """Where a file system has locks for each host alone (Lustre's localflock, NFS's nolock), both hold one."""
    paths: list[list[str]] = []

    def examples(counts):
        paths.append([file.name for file in tmp_path.glob("*.tmp")])
        yield from ((number,) for number in range(20_000))  # more than a batch, so that a part is in the file
        if len(paths) == 1:
            monkeypatch.setattr(socket, "gethostname", lambda: "gpu02")
            assert len(cached_table(MadeTable(SCHEMA, examples), tmp_path, [], word_tokenizer())) == 20_000

    monkeypatch.setattr(tables.fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu01")
    assert len(cached_table(MadeTable(SCHEMA, examples), tmp_path, [], word_tokenizer())) == 20_000
    assert len(paths) == 2 and set(paths[0]) < set(paths[1]), "made twice, with the first one's file still there"
    assert [file.suffix for file in tmp_path.iterdir()] == [".arrow"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(tables.fcntl, "flock", none)
    assert len(cached_table(numbers(), tmp_path, [], word_tokenizer())) == 3
    assert [file.suffix for file in tmp_path.iterdir()] == [".arrow"]


def test_a_large_table_without_room_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LARGE", 2**19)
    told = rf"{tmp_path} cannot be written \(File too large\), behind 1 MB of \w+\.arrow\. Make room"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(UserError, match=told):
            cached_table(numbers(400_000), tmp_path, [], word_tokenizer())  # 1.6 MB
        assert not list(tmp_path.iterdir())
        with pytest.raises(UserError, match=r"a temporary file .* \(File too large\), behind 1 MB of it\. Set TMPDIR"):
            cached_table(numbers(400_000), None, [], word_tokenizer())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_data_of_an_earlier_version_are_made_anew_and_told(tmp_path, capsys):
    older = tmp_path / f"{cache_key([], word_tokenizer(), format=tables.FORMAT - 1, kind='x')}.arrow"
    older.write_bytes(b"of another form")
    for _ in range(2):
        assert len(cached_table(numbers(), tmp_path, [], word_tokenizer(), kind="x")) == 3
    told = f"the same data were tokenised by an earlier version ({older}), and are tokenised anew\n"
    assert capsys.readouterr().err == told and older.exists()


def test_a_link_in_the_place_of_the_lock_is_not_written_through(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(Unwritten), alone(tmp_path / "lock"):
        pass
    assert (tmp_path / "theirs").read_text() == "theirs"
