"""What this process computes on, and how many share its machine."""

import pytest

from engine.zero.accelerator import on_gpu, ranks_of_this_machine


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
