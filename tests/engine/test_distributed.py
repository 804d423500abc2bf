"""What joining the process group clears away."""
import os
import time

from engine.distributed import _drop_stale_locks


def test_only_locks_of_killed_builds_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old, new = tmp_path / "py311" / "op" / "lock", tmp_path / "py311" / "other" / "lock"
    for lock in (old, new):
        lock.parent.mkdir(parents=True)
        lock.touch()
    an_hour_ago = time.time() - 3600
    os.utime(old, (an_hour_ago, an_hour_ago))
    _drop_stale_locks()
    assert not old.exists() and new.exists()
