"""Paths that lead nowhere. What Rust libraries raise of a file system is an OSError; what else they raise is left."""

import errno

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

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
