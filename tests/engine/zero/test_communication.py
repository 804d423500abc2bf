"""Joining the process group: what is refused before."""

from types import SimpleNamespace

import pytest

from engine.errors import UserError
from engine.zero import communication


@pytest.mark.parametrize("visible, told", [(None, r"sees 1 GPU: "), ("3", r"sees 1 GPU \(CUDA_VISIBLE_DEVICES=3\): ")])
def test_a_rank_that_does_not_see_its_gpu(visible, told, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": visible}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    gpu = SimpleNamespace(device_name=lambda: "cuda", device_count=lambda: 1)
    monkeypatch.setattr(communication, "get_accelerator", lambda: gpu)
    monkeypatch.setattr(communication.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(communication.distributed, "rank", lambda: 9)
    with pytest.raises(UserError, match=f"^rank 9 has LOCAL_RANK 1 and {told}"):
        communication.init()
