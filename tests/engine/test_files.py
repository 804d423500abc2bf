"""Paths that lead nowhere, what Rust libraries raise of a file system, and what cannot be put on the disk."""

import errno
import os

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from engine.atomic_files import remove_folder, restored, sync, whole_folder, write_whole
from engine.errors import UserError
from engine.files import expanded, os_errors, without_links


def test_a_link_to_itself_stays(tmp_path):
    loop, link, folder = tmp_path / "loop", tmp_path / "link", tmp_path / "folder"
    loop.symlink_to("loop")
    folder.mkdir()
    link.symlink_to(folder)
    assert without_links(loop / "x") == loop / "x"
    assert without_links(link / ".." / "link" / "x") == folder / "x"


def test_the_folder_of_a_user_that_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/x", "--output_dir") == tmp_path / "x"
    told = "--output_dir ~no_such_user/x: no home folder of ~no_such_user is known on this machine. Write"
    with pytest.raises(UserError, match=f"^{told}"):
        expanded("~no_such_user/x", "--output_dir")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: save_file({"a": torch.zeros(2)}, path),
        lambda path: Tokenizer(models.BPE()).save(path),
        lambda path: open(path, "w"),  # noqa: PTH123, SIM115
    ],
)
def test_a_folder_that_is_not_there(tmp_path, write):
    with pytest.raises(OSError) as caught, os_errors():
        write(str(tmp_path / "nowhere" / "file"))
    assert (caught.value.errno, caught.value.strerror) == (errno.ENOENT, "No such file or directory")


def test_what_is_no_matter_of_files():
    with pytest.raises(KeyError, match="a"), os_errors():
        {}["a"]


@pytest.mark.parametrize(
    "number, of_folder, of_file",
    [(errno.EINVAL, None, OSError), (errno.ENOTSUP, None, OSError), (errno.EIO, OSError, OSError)],
)
def test_only_a_folder_that_knows_no_such_call_is_let_pass(number, of_folder, of_file, tmp_path, monkeypatch):
    def fails(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", fails)
    (tmp_path / "file").write_text("a")
    for path, raised in ((tmp_path, of_folder), (tmp_path / "file", of_file)):
        if raised is None:
            sync(path)
            continue
        with pytest.raises(raised) as error:
            sync(path)
        assert error.value.errno == number


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt), whole_folder(folder) as partial:
        (partial / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())
    partial.mkdir()  # of a killed process that had this one's number
    (partial / "half").touch()
    folder.mkdir()
    with whole_folder(folder) as partial:
        (partial / "config.json").write_text("whole")
        assert not any(folder.iterdir())
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/config.json"]


def test_a_link_goes_and_what_it_leads_to_stays(tmp_path):
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (other / "theirs").write_text("theirs")
    (folder / "file.tmp").symlink_to(other / "theirs")
    write_whole(folder / "file", "ours")
    (folder / "actor.partial").symlink_to(other)
    remove_folder(folder / "actor.partial")
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "ours" and (other / "theirs").read_text() == "theirs"
    (folder / "actor.old").symlink_to(other)
    assert not restored(folder / "actor") and not (folder / "actor").exists()
