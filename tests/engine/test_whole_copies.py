"""A copy computes what its source does, tied weights and the score's offset included."""

import pytest
import torch

from engine.copies import architecture
from engine.experience import position_ids
from engine.models.hydra import load_hydra
from engine.models.loading import empty_like, load_policy, load_scorer
from engine.zero.gathering import copy_weights
from scripts.harness.models import make_causal_lm, make_scorer

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
