"""LoRA in a Policy: what trains, where it starts, and that it computes W + alpha / dim * B A."""

import math
from functools import partial

import pytest
import torch

from engine.algo import logprobs as logprob_module
from engine.algo.logprobs import head_logprobs
from engine.errors import UserError
from engine.experience import position_ids
from engine.models.loading import load_policy
from engine.models.lora import LoraSpec, adapt, target_names
from engine.models.policy import Policy
from scripts.harness.models import make_causal_lm

SEQUENCES = torch.arange(3, 19).view(2, 8)
MASK = torch.ones_like(SEQUENCES)


def policy(family: str, folder, **spec) -> Policy:
    found = load_policy(make_causal_lm(folder / family, family), torch.float32)
    if spec:
        adapt(found, LoraSpec(**spec), "actor")
    return found


def logprobs(module: Policy, **role) -> torch.Tensor:
    return module(SEQUENCES, MASK, position_ids(MASK), response_length=5, **role)[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_an_adapter_starts_as_nothing_and_computes_the_formula(family, tmp_path):
    plain, adapted = policy(family, tmp_path), policy(family, tmp_path, dim=4, alpha=2.0, only=True)
    assert torch.equal(logprobs(adapted), logprobs(plain))
    generator = torch.Generator().manual_seed(1)
    for name, (a, b) in adapted.adapters.factors().items():
        assert a.shape[0] == b.shape[1] == 4 and not b.any()
        assert a.abs().max() <= 1 / math.sqrt(4) and a.abs().max() > 0.8 / math.sqrt(4)
        with torch.no_grad():
            b.copy_(torch.randn(b.shape, generator=generator))
            change = 2.0 / 4 * b @ a
            weight = plain.model.get_submodule(name).weight
            weight += change.T if family == "gpt2" else change  # GPT-2's Conv1D holds its matrices transposed
    assert torch.allclose(logprobs(adapted), logprobs(plain), atol=1e-5)
    before = policy(family, tmp_path)
    assert torch.equal(logprobs(adapted, role="reference"), logprobs(before))
    assert not torch.equal(logprobs(adapted), logprobs(before))  # the role is the own one again


def test_only_factors_train_or_all_but_the_adapted_matrices(tmp_path):
    only, more = (policy("opt", tmp_path, dim=2, only=only, targets="decoder.layers.") for only in (True, False))
    trained = {name for name, parameter in only.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_A.actor." in name or ".lora_B.actor." in name for name in trained)
    frozen = {name for name, parameter in more.named_parameters() if not parameter.requires_grad}
    assert frozen and all(name.endswith(".base_layer.weight") for name in frozen)


def test_texts_and_names_choose_layers_and_a_text_that_is_nowhere_is_refused(tmp_path):
    model = policy("llama", tmp_path).model
    matrices = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    matrices += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    everything = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in matrices]
    assert target_names(model, "all-linear") == everything
    assert target_names(model, "layers.1.mlp") == everything[-3:]
    assert target_names(model, ("v_proj",)) == ["model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"]
    assert target_names(model, "lm_head") == ["lm_head"]
    with pytest.raises(UserError, match="'self_atn'.*Did you mean 'self_attn'"):
        target_names(model, "self_atn")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("only", [True, False])
def test_a_heads_adapter_is_the_heads_alone_and_logits_are_computed_in_chunks(tied, only, tmp_path, monkeypatch):
    """Against the formula's logits, all at once; the reference has none of it, and gradients reach all factors."""
    base = make_causal_lm(tmp_path / "base", tied=tied)
    plain, adapted = (load_policy(base, torch.float32) for _ in range(2))
    adapt(adapted, LoraSpec(dim=4, alpha=6.0, only=only, targets=("all-linear", "lm_head")), "actor")
    generator = torch.Generator().manual_seed(1)
    factors = adapted.adapters.factors()
    with torch.no_grad():
        for _, b in factors.values():
            b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    embedding = adapted.model.get_input_embeddings().weight
    assert embedding.requires_grad == (not only and not tied)  # a tied one is an adapted matrix
    weights = {name: plain.model.get_submodule(name).weight for name in factors}
    changed = {name: (weights[name] + 1.5 * b @ a).detach().requires_grad_() for name, (a, b) in factors.items()}
    trunk = {f"{name}.weight": weight for name, weight in changed.items() if name != "lm_head"}
    hidden = torch.func.functional_call(plain.model, trunk, (SEQUENCES, MASK), {"output_hidden_states": True})
    logits = hidden.hidden_states[-1] @ changed["lm_head"].T
    expected = logits[:, 2:7].log_softmax(-1).gather(-1, SEQUENCES[:, 3:, None]).squeeze(-1)
    rows: list[int] = []
    count = logprob_module.token_logprobs
    monkeypatch.setattr(logprob_module, "token_logprobs", lambda x, *rest: (rows.append(x.numel()), count(x, *rest))[1])
    monkeypatch.setattr("engine.models.heads.head_logprobs", partial(head_logprobs, at_once=3 * 64))
    found = logprobs(adapted)
    assert adapted.direct_head and max(rows) == 3 * 64 and sum(rows) == 10 * 64
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weighting = torch.randn(found.shape, generator=generator)
    (found * weighting).sum().backward()
    gradients = torch.autograd.grad((expected * weighting).sum(), list(changed.values()))
    for (a, b), gradient in zip(factors.values(), gradients, strict=True):
        for factor, own in ((a, 1.5 * b.detach().T @ gradient), (b, 1.5 * gradient @ a.detach().T)):
            assert (factor.grad - own).norm() < 1e-5 * own.norm()
    assert torch.equal(logprobs(adapted, role="reference"), logprobs(load_policy(base, torch.float32)))
