"""What this process computes on; what loading an extension of DeepSpeed's clears away, one process at a time."""

import fcntl
from types import SimpleNamespace

import pytest

from engine.zero.accelerator import load_extension, on_gpu, ranks_of_this_machine


def test_the_mark_of_a_killed_build_is_removed_before_and_nobody_else_builds_meanwhile(tmp_path, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    mark = tmp_path / "py311" / "op" / "lock"
    mark.parent.mkdir(parents=True)
    mark.touch()
    loaded = []

    def load():
        assert not mark.exists()
        with (tmp_path / "four_engine_rlhf.lock").open() as other, pytest.raises(BlockingIOError):
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
    with (tmp_path / "four_engine_rlhf.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given up again


@pytest.mark.parametrize(
    "environment, ranks",
    [
        ({}, 1),
        ({"WORLD_SIZE": "8"}, 8),
        ({"WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, 8),  # the deepspeed launcher's
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, 4),  # torchrun's
    ],
)
def test_the_ranks_that_share_a_machine_are_the_launchers(environment, ranks, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks_of_this_machine() == ranks


def test_a_run_on_cpus_is_none_on_a_gpu_though_the_machine_has_one(monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(get_accelerator(), "device_name", lambda: "cpu")
    assert not on_gpu()
    monkeypatch.setattr(get_accelerator(), "device_name", lambda: "cuda")
    assert on_gpu()
