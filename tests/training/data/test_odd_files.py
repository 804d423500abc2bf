"""What is no file, what changes while it is read, and what is too large or too deep: one message, and no waiting."""

import hashlib
import json
import os
import socket

import pytest

from engine.errors import UserError
from engine.files import open_file
from engine.zero.config import stage_of_file
from tests.training.data.reading import rows_of
from training.config.parsing import read_yaml
from training.data.files import DataFile, read_records
from training.data.forms import PROMPTS, SFT
from training.data.sources import open_source


@pytest.fixture
def odd(tmp_path):
    """A folder with a pipe, a socket and a link to a device, all named like data files."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(tmp_path / "socket.jsonl"))
        (tmp_path / "device.jsonl").symlink_to("/dev/zero")
        yield tmp_path


@pytest.mark.parametrize(
    "name, kind", [("pipe", "a pipe, which can be read once only"), ("socket", "a socket"), ("device", "a device")]
)
def test_what_is_no_file_is_refused_and_never_opened(odd, name, kind):
    path = odd / f"{name}.jsonl"
    with pytest.raises(UserError, match=rf"{name}.jsonl: cannot be read \(it is {kind}\); check the path"):
        open_source(str(path))
    with pytest.raises(UserError, match=rf"--config .*{name}.jsonl: cannot be read \(it is {kind}\)"):
        read_yaml(str(path))
    with pytest.raises(OSError, match=kind):
        open_file(path)
    assert stage_of_file(str(path), "actor") is None


def test_what_is_no_file_in_a_folder_is_passed_over(odd):
    with pytest.raises(UserError, match="found no data set in this folder"):
        open_source(str(odd))
    (odd / "train.jsonl").write_text('{"text": "a"}\n')
    assert len(open_source(str(odd)).training[0]) == 1


@pytest.mark.parametrize("change", ["appended", "cut", "written again"])
def test_a_file_that_changes_while_it_is_read(tmp_path, change):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"a{number}"}) + "\n" for number in range(2000)))
    records = read_records(path)
    assert records[1999][1] == {"text": "a1999"}
    content = path.read_bytes()
    os.utime(path, ns=(0, 0))  # so that the new time is another one, however coarse the file system's clock
    records = read_records(path)
    if change == "appended":
        path.write_bytes(content + b"{}\n")
    elif change == "cut":
        os.truncate(path, 10)  # reading a mapped file behind this would kill the process
    else:
        path.write_bytes(content.replace(b"a1", b"b1"))
    with pytest.raises(UserError, match=r"rows.jsonl: was changed while it was read\. Start again"):
        records[1999]


def test_a_file_that_is_replaced_is_read_to_its_end_as_it_was(tmp_path):
    path, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    path.write_text('{"text": "old"}\n' * 2)
    other.write_text('{"text": "new"}\n')
    records = read_records(path)
    other.replace(path)
    assert [records[0][1], records[1][1]] == [{"text": "old"}] * 2


def test_parts_of_a_file(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"abc\ndef")
    file = DataFile(tmp_path / "rows.csv")
    assert list(file.lines()) == [b"abc\n", b"def"]
    assert (file.read(), file.read(2, 5), file.read(5), file.read(9, 12)) == (b"abc\ndef", b"c\nd", b"ef", b"")
    assert file.hash() == hashlib.sha256(b"abc\ndef").hexdigest()


def test_a_text_of_a_hundred_megabytes_is_refused_by_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.write('{"text": "a"}\n{"text": "' + "word " * 20_000_000 + '"}\n')
    with pytest.raises(
        UserError, match=r"line 2, column text: found 100,000,000 characters; needed at most 10,000,000"
    ):
        rows_of(path, SFT)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_lists_within_lists(tmp_path, name):
    record = '{"prompt": "a", "more": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (tmp_path / name).write_text(f"[{record}]" if name == "rows.json" else record)
    with pytest.raises(UserError, match="brackets within brackets, too deep"):
        rows_of(tmp_path / name, PROMPTS)
