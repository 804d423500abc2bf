"""The actor's copy computes what the actor does, with its adapter merged, and is filled again after an update."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from engine.actor_copy import ActorCopy
from engine.experience import position_ids
from engine.models.adapters import Adapters
from engine.models.loading import load_policy
from engine.models.lora import LoraSpec, adapt
from engine.models.saving import merged_weights
from engine.rollout.backends import ReplicaRollouts
from scripts.harness.models import make_causal_lm, make_tokenizer
from tests.engine.rollout.test_decode import BATCH, SAMPLING, answers

TOKENS = torch.arange(4, 20).view(2, 8)
MASK = torch.ones_like(TOKENS)


def engine(module, stage: int = 3) -> SimpleNamespace:
    """What ActorCopy asks of an engine; its weights stand whole, which gathering leaves as they are."""
    return SimpleNamespace(module=module, stage=stage, version=0, copy=None)


@torch.no_grad()
def train(model: SimpleNamespace, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.module.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.version += 1


@torch.no_grad()
def logprobs(module, **role) -> torch.Tensor:
    return module(TOKENS, MASK, position_ids(MASK), response_length=5, **role)[0]


@pytest.mark.parametrize("family, tied", [("llama", True), ("llama", False), ("gpt2", True), ("opt", True)])
def test_a_copy_is_filled_when_the_actor_has_learned(tmp_path, family, tied):
    actor = engine(load_policy(make_causal_lm(tmp_path, family, tied=tied), torch.float32).eval())
    copy, gathered = ActorCopy(actor), []

    def watched(module):
        gathered.append(module)
        return merged_weights(module)

    assert copy.current_module() is None
    with mock.patch("engine.actor_copy.merged_weights", watched):
        for fills in (1, 2):
            module = copy.module()
            assert copy.module() is module is copy.current_module() and len(gathered) == fills
            assert (module.model.get_output_embeddings().weight is module.model.get_input_embeddings().weight) == tied
            assert torch.equal(logprobs(module), logprobs(actor.module)) and logprobs(module).isfinite().all()
            train(actor, fills)
            assert copy.current_module() is None


def test_what_is_released_between_steps(tmp_path):
    actor = engine(load_policy(make_causal_lm(tmp_path, "llama"), torch.float32).eval())
    for between_steps, module, lent in (("keep", True, True), ("free", False, False)):
        copy = ActorCopy(actor, between_steps=between_steps)
        before = copy.module()
        copy.release_memory()
        assert (copy._module is before, copy.current_module() is before) == (module, lent)
        assert torch.equal(logprobs(copy.module()), logprobs(actor.module))


CASES = [("llama", False, "all-linear"), ("gpt2", False, "all-linear"), ("llama", True, "q_proj"), ("opt", False, "")]


@pytest.mark.parametrize("family, tied, targets", CASES)
def test_an_adapter_is_merged_into_the_copy_alone(tmp_path, family, tied, targets):
    policy = load_policy(make_causal_lm(tmp_path, family, tied=tied), torch.float32).eval()
    adapt(policy, LoraSpec(dim=4, alpha=6.0, only=True, targets=targets), "actor")
    actor = engine(policy)
    copy = ActorCopy(actor)
    for seed in (1, 2):
        train(actor, seed)
        assert torch.allclose(logprobs(copy.module()), logprobs(policy), atol=1e-5)
        assert not torch.allclose(logprobs(policy), logprobs(policy, role="reference"), atol=1e-3)
        assert copy.current_module() is None, "no pass of the actor or the reference may use merged weights"


def test_an_embedding_that_is_the_head_too_is_not_merged_into(tmp_path):
    """Adapters made elsewhere may have the head among their layers."""
    policy = load_policy(make_causal_lm(tmp_path, "llama", tied=True), torch.float32).eval()
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    policy.direct_head, _ = False, inject_adapter_in_model(config, policy.model, adapter_name="actor")
    policy.adapters = Adapters(policy.model, "actor", {"actor": config})
    merged = ActorCopy(engine(policy)).module()
    assert torch.allclose(logprobs(merged), logprobs(policy), atol=1e-5)
    assert not torch.allclose(logprobs(policy), logprobs(policy, role="reference"), atol=1e-2)


def test_a_merged_matrix_is_rounded_once(tmp_path):
    """Of bfloat16 matrices: what is added is not rounded by itself."""
    policy = load_policy(make_causal_lm(tmp_path, "llama"), torch.bfloat16)
    adapt(policy, LoraSpec(dim=2, only=True, targets="q_proj"), "actor")
    actor = engine(policy)
    train(actor, 1)
    merged = ActorCopy(actor).module()
    for name, (a, b) in policy.adapters.factors().items():
        exact = policy.model.get_submodule(name).base_layer.weight.double() + b.double() @ a.double() / 2
        found = merged.model.get_submodule(name).weight
        assert (found.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
        assert (found == exact.bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize(
    "decoding, tied, stage",
    [("plain", False, 3), ("recorded", False, 0), ("recorded", True, 3)],
)
def test_responses_are_the_actors_whatever_was_asked_last(tmp_path, decoding, tied, stage):
    """And with the factors as they are by then, in a recording too; beside a tied head's matrix they stay factors."""
    policy = load_policy(make_causal_lm(tmp_path, "llama", tied=tied), torch.float32).eval()
    before = load_policy(str(tmp_path), torch.float32)
    head = before.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    adapt(policy, LoraSpec(dim=4, only=True, targets=""), "actor")
    actor = engine(policy, stage)
    rollouts = ReplicaRollouts(actor, make_tokenizer(), decoding=decoding)
    plain = ReplicaRollouts(engine(before, 0), make_tokenizer())
    assert answers(rollouts.generate(BATCH, SAMPLING)) == answers(plain.generate(BATCH, SAMPLING))
    for seed in (1, 2):
        train(actor, seed)
        logprobs(policy, role="reference")
        found = answers(rollouts.generate(BATCH, SAMPLING))
        with torch.no_grad():
            for name, (a, b) in policy.adapters.factors().items():
                layer = policy.adapters.layers[name]
                fresh = layer.get_base_layer().weight + layer.scaling["actor"] * (b @ a)
                before.model.get_submodule(name).weight.copy_(fresh)
        assert found == answers(plain.generate(BATCH, SAMPLING))
    assert type(rollouts.sampler._passes).__name__ == ("RecordedPasses" if decoding == "recorded" else "Passes")
