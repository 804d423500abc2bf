"""What cannot be put on the disk is an error, but for file systems that have no such call for folders."""

import errno
import os

import pytest

from engine.whole_files import sync


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
