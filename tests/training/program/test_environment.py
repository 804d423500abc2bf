"""What the programs make of the environment that they are started in."""

import os
import shutil
import sysconfig

from training.program.environment import own_programs_first


def test_programs_of_this_python_are_found_without_its_activation(tmp_path, monkeypatch):
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    own_programs_first()
    assert shutil.which("ninja") == str(tmp_path / "ninja")
    assert os.environ["PATH"] == f"{tmp_path}:/usr/bin:/bin"
    own_programs_first()
    assert os.environ["PATH"] == f"{tmp_path}:/usr/bin:/bin"
