"""What DeepSpeed does to an optimizer and to bad gradients, in one process at stage 0."""

import pytest
import torch

from engine.models.loading import load_policy
from engine.rlhf_engine import EngineSpec, OptimizerSpec, trained_model
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from scripts.harness.models import make_causal_lm
from tests.engine.zero.shard_memory import InMemory, whole

LR = 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    init()
    return make_causal_lm(tmp_path_factory.mktemp("actor"))


def build(folder, dtype, weight_decay=0.0):
    spec = EngineSpec(actor_path=folder, critic_path="", dtype=dtype)
    return trained_model(
        load_policy,
        folder,
        EngineConfig("actor", 0),
        OptimizerSpec(lr=LR, weight_decay=weight_decay, max_grad_norm=0.0),
        spec,
    )


def one_step(model, factor=1.0):
    tokens = torch.arange(4, 20).view(2, 8)
    ones = torch.ones_like(tokens)
    logprobs, _ = model(tokens, ones, ones.cumsum(-1) - 1, response_length=5)
    model.backward(logprobs.sum() * factor, last=True)
    return model.overflowed()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adams_first_step_moves_each_weight_by_the_learning_rate(folder, dtype):
    """m / (sqrt(v) + eps) is the gradient's sign at step 1; a step taken before it would make that 0.735."""
    model = build(folder, dtype)
    before = [shard.clone() for shard in model.master_shards()]
    assert not one_step(model)
    assert model.step(LR)
    moved = torch.cat([(new - old).abs().flatten() for new, old in zip(model.master_shards(), before)])
    moved = moved[moved > 0]
    assert len(moved) > 1000
    assert moved.median().item() == pytest.approx(LR, rel=1e-3)


def test_masters_are_the_loaded_weights_however_large_the_decay(folder):
    model = build(folder, "bf16", weight_decay=0.5)
    weights = [p.detach().float().flatten() for p in model.module.parameters()]
    masters = [shard.flatten() for shard in model.master_shards()]
    assert torch.equal(torch.cat(weights).sort().values, torch.cat(masters).sort().values)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_is_seen_before_the_step(folder, dtype):
    model = build(folder, dtype)
    assert one_step(model, factor=float("inf"))
    assert not model.scales_loss


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_restart_takes_moments_from_the_checkpoint_and_decay_from_the_run(folder, dtype):
    """p <- p (1 - lr decay) - lr m / sqrt(v): with the same moments the decay is all that differs, in matrices."""
    first = build(folder, dtype)
    one_step(first)
    first.step(LR)
    source, scalars = InMemory(whole(first.shards())), first.scalars()
    shards = {}
    for decay in (0.0, 0.5):
        model = build(folder, dtype, weight_decay=decay)
        model.load_shards(source, scalars)
        before = [shard.clone() for shard in model.master_shards()]
        one_step(model)
        model.step(LR)
        shards[decay] = [shard.clone() for shard in model.master_shards()]
    for start, plain, decayed in zip(before, shards[0.0], shards[0.5]):
        expected = plain - LR * 0.5 * start if start.dim() > 1 else plain
        torch.testing.assert_close(decayed, expected, rtol=0, atol=1e-6)
