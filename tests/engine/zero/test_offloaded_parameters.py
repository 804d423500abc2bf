"""Frozen models at stage 3 that are offloaded have their parameters in pinned host memory."""

import pytest
from deepspeed.accelerator import get_accelerator

from engine.models.loading import load_policy, load_scorer
from engine.rlhf_engine import EngineSpec, frozen_model
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from scripts.harness.models import make_causal_lm, make_scorer


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("role", ["reference", "reward"])
def test_their_bytes(tmp_path, monkeypatch, role, offload):
    """Counted where DeepSpeed asks for pinned host memory, since on a CPU each place is host memory."""
    init()
    pinned = []
    monkeypatch.setattr(get_accelerator(), "pin_memory", lambda tensor, *args: pinned.append(tensor.nbytes) or tensor)
    make, load = (make_causal_lm, load_policy) if role == "reference" else (make_scorer, load_scorer)
    path, spec = make(tmp_path / "model"), EngineSpec(actor_path="", critic_path="")
    model = frozen_model(load, path, EngineConfig(role, 3, offload), spec)
    shards = [parameter.ds_tensor for parameter in model.module.parameters()]
    assert sum(pinned) == (sum(shard.nbytes for shard in shards) if offload else 0)
