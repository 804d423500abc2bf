"""What Rust libraries raise of a file system is an OSError; what else they raise is left."""

import errno

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from engine.files import os_errors


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
