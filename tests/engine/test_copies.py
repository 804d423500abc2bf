"""A copy computes what its source does, tied weights and the score's offset included; with adapters it is merged where
responses are drawn, and exact everywhere else.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from engine.copies import WholeCopies, architecture
from engine.experience import position_ids
from engine.models.adapters import Adapters
from engine.models.hydra import load_hydra
from engine.models.loading import empty_like, load_policy, load_scorer
from engine.models.lora import LoraSpec, adapt
from engine.rollout.backends import ReplicaRollouts
from engine.zero.gathering import copy_weights
from scripts.harness.models import make_causal_lm, make_scorer, make_tokenizer
from tests.engine.rollout.test_decode import BATCH, SAMPLING, answers

TOKENS = torch.arange(4, 20).view(2, 8)
MASK = torch.ones_like(TOKENS)


def copied(module):
    copy = empty_like(module, torch.device("cpu"))
    copy_weights(module, copy)
    copy.take_settings_of(module)
    return copy


@pytest.mark.parametrize("family, tied", [("llama", True), ("llama", False), ("gpt2", True), ("opt", True)])
def test_a_policy(tmp_path, family, tied):
    policy = load_policy(make_causal_lm(tmp_path, family, tied=tied), torch.float32)
    copy = copied(policy)
    assert (copy.model.get_output_embeddings().weight is copy.model.get_input_embeddings().weight) == tied
    with torch.no_grad():
        own, other = (module(TOKENS, MASK, position_ids(MASK), response_length=5) for module in (policy.eval(), copy))
    assert torch.equal(own[0], other[0]) and other[0].isfinite().all()


def test_a_scorer(tmp_path):
    scorer = load_scorer(make_scorer(tmp_path, "llama", offset=-0.3), torch.float32)
    with torch.no_grad():
        own, other = (module(TOKENS, MASK, position_ids(MASK)) for module in (scorer.eval(), copied(scorer)))
    assert torch.equal(own, other)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_hydra_policy_of_which_only_what_trains_is_copied_anew(tmp_path, tied):
    policy = load_hydra(make_causal_lm(tmp_path, "llama", tied=tied), torch.float32, layers=1).eval()
    copy = copied(policy)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1)
    frozen = {
        name: parameter.clone()
        for name, parameter in copy.named_parameters()
        if not policy.get_parameter(name).requires_grad
    }
    policy.model.get_input_embeddings().weight.mul_(2)  # would be noticed
    copy_weights(policy, copy, [name for name, p in policy.named_parameters() if p.requires_grad])
    assert frozen and all(torch.equal(copy.get_parameter(name), before) for name, before in frozen.items())
    policy.model.get_input_embeddings().weight.div_(2)
    for reference in (False, True):
        own, other = (
            module(TOKENS, MASK, position_ids(MASK), response_length=5, role="reference" if reference else None)[0]
            for module in (policy, copy)
        )
        assert torch.equal(own, other)


def test_a_source_of_another_shape_is_noticed(tmp_path):
    tied, untied = (
        load_policy(make_causal_lm(tmp_path / str(tied), "llama", tied=tied), torch.float32) for tied in (True, False)
    )
    with pytest.raises(AssertionError, match="lm_head.weight"):
        copy_weights(tied.model, empty_like(untied, torch.device("cpu")).model)


def test_models_share_a_copy_by_the_dtype_of_their_weights_and_not_of_their_files(tmp_path):
    path = make_causal_lm(tmp_path, "llama")
    one, other, halved = (load_policy(path, dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16))
    other.model.config.dtype, halved.model.config.dtype = torch.bfloat16, one.model.config.dtype
    assert architecture(one) == architecture(other) != architecture(halved)


CASES = [("llama", False, "all-linear"), ("gpt2", False, "all-linear"), ("llama", True, "q_proj"), ("opt", False, "")]


def engine(module, stage: int = 3) -> SimpleNamespace:
    """What WholeCopies asks of an engine; its weights stand whole, which gathering leaves as they are."""
    return SimpleNamespace(module=module, stage=stage, version=0)


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


@pytest.mark.parametrize("family, tied, targets", CASES)
def test_a_copy_is_merged_for_generating_and_exact_again_afterwards(tmp_path, family, tied, targets):
    policy = load_policy(make_causal_lm(tmp_path, family, tied=tied), torch.float32).eval()
    adapt(policy, LoraSpec(dim=4, alpha=6.0, only=True, targets=targets), "actor")
    actor, copies, matrices = engine(policy), WholeCopies(), sorted(policy.adapters.targets())
    assert ("lm_head" in matrices) == (not targets)
    factors = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    bases = {f"model.{name}.base_layer.weight" for name in matrices}
    gathered: list = []

    def watched(source, target, names=None):
        gathered.append(names)
        copy_weights(source, target, names)

    with mock.patch("engine.copies.copy_weights", watched):
        for seed, expected in ((1, None), (2, factors)):
            train(actor, seed)
            merged = copies.of(actor, merged=True)
            assert gathered == [expected]  # after an update the factors alone
            assert sorted(merged.adapters.merged) == matrices
            close = logprobs(merged)
            assert torch.allclose(close, logprobs(policy), atol=1e-5)
            assert copies.of(actor, merged=True) is merged and len(gathered) == 1
            for _ in range(2):
                exact = copies.of(actor)
                assert exact is merged and not exact.adapters.merged
                assert gathered == [expected, bases]  # of what is frozen, what was merged into, once
                for role in (None, "reference"):
                    assert torch.equal(logprobs(exact, role=role), logprobs(policy, role=role))
            assert not torch.equal(close, logprobs(policy, role="reference"))
            gathered.clear()


def test_an_embedding_that_is_the_head_too_is_not_merged_into(tmp_path):
    """Adapters made elsewhere may have the head among their layers."""
    policy = load_policy(make_causal_lm(tmp_path, "llama", tied=True), torch.float32).eval()
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    policy.direct_head, _ = False, inject_adapter_in_model(config, policy.model, adapter_name="actor")
    policy.adapters = Adapters(policy.model, "actor", {"actor": config})
    merged = WholeCopies().of(engine(policy), merged=True)
    assert all(name.endswith(".q_proj") for name in merged.adapters.merged) and merged.adapters.merged
    assert torch.allclose(logprobs(merged), logprobs(policy), atol=1e-5)
    assert not torch.allclose(logprobs(policy), logprobs(policy, role="reference"), atol=1e-2)


def test_a_merged_copy_refuses_to_be_another_model(tmp_path):
    policy = load_policy(make_causal_lm(tmp_path, "llama"), torch.float32)
    adapt(policy, LoraSpec(dim=2, only=True), "actor")
    merged = WholeCopies().of(engine(policy), merged=True)
    with pytest.raises(AssertionError, match="reference"):
        logprobs(merged, role="reference")


def test_a_merged_matrix_is_rounded_once(tmp_path):
    """Of bfloat16 matrices: what is added is not rounded by itself."""
    policy = load_policy(make_causal_lm(tmp_path, "llama"), torch.bfloat16)
    adapt(policy, LoraSpec(dim=2, only=True, targets="q_proj"), "actor")
    actor = engine(policy)
    train(actor, 1)
    merged = WholeCopies().of(actor, merged=True)
    for name, (a, b) in policy.adapters.factors().items():
        exact = policy.model.get_submodule(name).base_layer.weight.double() + b.double() @ a.double() / 2
        found = merged.model.get_submodule(name).base_layer.weight
        assert (found.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
        assert (found == exact.bfloat16()).float().mean() > 0.99


def test_a_critic_keeps_the_reward_models_head(tmp_path):
    path = make_scorer(tmp_path, "llama", offset=-0.3)
    critic, reward = (load_scorer(path, torch.float32).eval() for _ in range(2))
    critic.keep_head("reward")
    adapt(critic, LoraSpec(dim=4, only=True), "critic")
    model, copies = engine(critic), WholeCopies()
    copies.of(model)
    train(model, 1)
    assert not torch.equal(critic.model.score.weight, reward.model.score.weight)
    assert not any("kept" in name for name in critic.model.state_dict())
    with torch.no_grad():
        inputs = TOKENS, MASK, position_ids(MASK)
        for module in (critic, copies.of(model)):
            assert torch.equal(module(*inputs, role="reward"), reward(*inputs))
            assert torch.equal(module(*inputs), critic(*inputs))
            assert not torch.equal(module(*inputs), reward(*inputs))


@pytest.mark.parametrize(
    "decoding, tied, stage",
    [("plain", False, 3), ("recorded", False, 0), ("recorded", True, 0), ("recorded", True, 3)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("plain", False, 0), ("recorded", False, 3))],
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
        rollouts.copies.of(actor)(TOKENS, MASK, position_ids(MASK), response_length=5, role="reference")
        found = answers(rollouts.generate(BATCH, SAMPLING))
        with torch.no_grad():
            for name, (a, b) in policy.adapters.factors().items():
                layer = policy.adapters.layers[name]
                fresh = layer.get_base_layer().weight + layer.scaling["actor"] * (b @ a)
                before.model.get_submodule(name).weight.copy_(fresh)
        assert found == answers(plain.generate(BATCH, SAMPLING))
    assert type(rollouts.sampler._passes).__name__ == ("RecordedPasses" if decoding == "recorded" else "Passes")
