"""What cannot be put on the disk is an error, but for file systems that have no such call for folders; and no link is
written through, or a folder removed through one."""

import errno
import os

import pytest

from engine.whole_files import remove_folder, restored, sync, write_whole


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
