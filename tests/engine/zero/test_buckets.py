"""Buffers for gradients are no larger than the gradients."""

import pytest
import torch

from engine.models.loading import load_policy
from engine.rlhf_engine import EngineSpec, OptimizerSpec, trained_model
from engine.zero.communication import init
from engine.zero.config import EngineConfig, read_ds_file
from scripts.harness.models import make_causal_lm
from tests.engine.meters import LiveBytes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_small_model_has_small_buffers(tmp_path, stage):
    init()
    path = make_causal_lm(tmp_path / "model")
    spec, choice = EngineSpec(actor_path=path, critic_path=""), EngineConfig("actor", stage)
    with LiveBytes() as meter:
        model = trained_model(load_policy, path, choice, OptimizerSpec(lr=1e-3), spec)
        tokens = torch.arange(4, 20).view(2, 8)
        ones = torch.ones_like(tokens)
        logprobs, _ = model(tokens, ones, ones.cumsum(-1) - 1, response_length=5)
        model.backward(logprobs.sum(), last=True)
        assert not model.overflowed() and model.step(1e-3)
    size = sum(shard.nbytes for shard in model.master_shards())
    assert 4 * read_ds_file(choice)["zero_optimization"]["reduce_bucket_size"] > 1000 * size  # as the file has it
    assert meter.peak < 20 * size
