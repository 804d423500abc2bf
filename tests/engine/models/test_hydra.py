"""Hydra policies of every family by themselves: what trains, what the reference is, and what is refused."""

import pytest
import torch
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from engine.errors import UserError
from engine.experience import position_ids
from engine.models.hydra import check_hydra, load_hydra
from engine.models.loading import load_policy
from scripts.harness.models import EOS, VOCABULARY, make_causal_lm, save_random
from tests.made import Made

LAYERS = 3
SEQUENCES = torch.randint(4, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(SEQUENCES)
MASK[0, :3] = 0
PARTS = {  # layers and final norm
    "llama": ("model.layers", "model.norm"),
    "mistral": ("model.layers", "model.norm"),
    "qwen2": ("model.layers", "model.norm"),
    "gpt2": ("transformer.h", "transformer.ln_f"),
    "gpt_neox": ("gpt_neox.layers", "gpt_neox.final_layer_norm"),
    "bloom": ("transformer.h", "transformer.ln_f"),
    "opt": ("model.decoder.layers", "model.decoder.final_layer_norm"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{(family, tied): path}"""
    root = tmp_path_factory.mktemp("hydra")
    return Made(lambda key: make_causal_lm(root / "{}_{}".format(*key), key[0], tied=key[1], layers=LAYERS))


def logprobs(policy, **how):
    return policy(SEQUENCES, MASK, position_ids(MASK), response_length=5, temperature=0.7, **how)[0]


@torch.no_grad()
def disturb(policy):
    generator = torch.Generator().manual_seed(2)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("tied, layers, direct_head", [(False, 1, True), (True, LAYERS, False), (True, 1, True)])
@pytest.mark.parametrize("family", PARTS)
def test_reference_stays_the_untouched_model(folders, family, tied, layers, direct_head):
    path = folders[family, tied]
    check_hydra(path, layers, "--actor")
    policy, untouched = load_hydra(path, torch.float32, layers=layers), load_policy(path, torch.float32)
    policy.direct_head = untouched.direct_head = direct_head
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    disturb(policy)
    with torch.no_grad():
        assert torch.equal(logprobs(policy, role="reference"), logprobs(untouched))
        assert (logprobs(policy) - logprobs(untouched)).abs().max() > 0.05
    stack, norm = PARTS[family]
    parts = [f"{stack}.{index}" for index in range(LAYERS)][-layers:] + [norm] + ([] if tied else ["lm_head"])
    assert policy.names == parts
    logprobs(policy).sum().backward()
    for name, parameter in policy.model.named_parameters():
        trains = name.startswith(tuple(f"{part}." for part in parts))
        assert (parameter.grad is not None) == trains == (not torch.equal(parameter, before[name])), name
    assert all(parameter.grad is None for parameter in policy.branch.parameters())


def test_an_error_within_the_reference_leaves_the_trained_parts_in_place(folders):
    policy = load_hydra(folders["llama", False], torch.float32, layers=1)
    disturb(policy)
    with torch.no_grad():
        before = logprobs(policy)
        with pytest.raises(IndexError):
            policy(SEQUENCES + VOCABULARY, MASK, position_ids(MASK), response_length=5, role="reference")
        assert torch.equal(logprobs(policy), before)


def test_more_layers_than_there_are_is_refused(folders):
    with pytest.raises(UserError, match=r"--actor .*llama_False: hydra_layers 4: the actor has 3 layers. Give at most"):
        check_hydra(folders["llama", False], LAYERS + 1, "--actor")


def test_a_model_without_a_plain_stack_of_layers_is_refused_by_name(tmp_path):
    config = OpenAIGPTConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=EOS
    )
    folder = save_random(OpenAIGPTLMHeadModel(config), tmp_path)
    with pytest.raises(UserError, match="hydra_layers 1: OpenAIGPTLMHeadModel has no stack of decoder layers"):
        check_hydra(folder, 1, "--actor")
