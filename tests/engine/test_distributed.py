"""What loading an extension of DeepSpeed's clears away, and that one process at a time does it."""

import fcntl
from types import SimpleNamespace

import pytest

from engine.distributed import load_extension


def test_the_mark_of_a_killed_build_is_removed_before_and_nobody_else_builds_meanwhile(tmp_path, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    mark = tmp_path / "py311" / "op" / "lock"
    mark.parent.mkdir(parents=True)
    mark.touch()
    loaded = []

    def load():
        assert not mark.exists()
        with open(tmp_path / "four_engine_rlhf.lock") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        loaded.append(True)

    builders = {
        "Fits": SimpleNamespace(NAME="fits", is_compatible=lambda: True, load=load),
        "DoesNot": SimpleNamespace(NAME="does_not", is_compatible=lambda: False, load=load),
    }
    monkeypatch.setattr(get_accelerator(), "create_op_builder", builders.get)
    load_extension("Fits")
    load_extension("DoesNot")
    load_extension("Unknown")
    assert loaded == [True]
    with open(tmp_path / "four_engine_rlhf.lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given up again
