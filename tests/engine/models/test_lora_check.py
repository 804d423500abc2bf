"""What an adapter will be of a model is known from the configuration alone, with numbers counted by hand."""

import pytest
import torch
from transformers import AutoConfig

from engine.errors import UserError
from engine.models.loading import load_policy, load_scorer
from engine.models.lora import AdaptedModel, LoraSpec, adapt
from scripts.harness.models import make_causal_lm, make_config, make_scorer

# The tiny Llama, 32 wide: queries and output 32 x 32, keys and values 16 x 32, three matrices of 32 x 48.
MATRICES = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)
FACTORS = 2 * (2 * (32 + 32) + 2 * (16 + 32) + 3 * (32 + 48))  # for each rank
REST = 2 * 64 * 32 + 5 * 32  # embedding, head, norms


@pytest.fixture
def path(tmp_path) -> str:
    """A folder with a configuration and no weights."""
    make_config("llama").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_parameters_are_counted(path):
    only = AdaptedModel.of(path, LoraSpec(dim=4, only=True), "--actor_model_name_or_path")
    assert (only.trained, only.total) == (4 * FACTORS, MATRICES + REST + 4 * FACTORS)
    more = AdaptedModel.of(path, LoraSpec(dim=4), "--actor_model_name_or_path")
    assert (more.trained, more.total) == (4 * FACTORS + REST, MATRICES + REST + 4 * FACTORS)
    scorer = AdaptedModel.of(path, LoraSpec(dim=4, only=True), "--critic_model_name_or_path", scorer=True)
    assert (scorer.trained, scorer.total) == (4 * FACTORS + 32, MATRICES + REST - 64 * 32 + 32 + 4 * FACTORS)
    some = AdaptedModel.of(path, LoraSpec(dim=2, alpha=3, only=True, lr=1e-3, targets=("q_proj",)), "--x")
    assert some.trained == 2 * 2 * (32 + 32) and some.layers == [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    assert some.summary().startswith(
        "rank 2, alpha 3, learning rate 0.001, in 2 layers (q_proj); 256 of 19,872 parameters train (1.3 %), all else"
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom"])
def test_it_is_what_loading_makes(family, tmp_path):
    for scorer, make, load in ((False, make_causal_lm, load_policy), (True, make_scorer, load_scorer)):
        folder = make(tmp_path / f"{family}_{scorer}", family)
        for only in (True, False):
            spec = LoraSpec(dim=2, only=only)
            module = load(folder, torch.float32)
            adapt(module, spec, "model")
            found = AdaptedModel.of(folder, spec, "--x", scorer)
            assert found.layers == module.adapters.targets()
            assert found.total == sum(p.numel() for p in module.model.parameters())
            assert found.trained == sum(p.numel() for p in module.model.parameters() if p.requires_grad)


def test_a_name_that_is_nowhere_is_refused_beside_one_that_is_found(path):
    with pytest.raises(UserError) as caught:
        AdaptedModel.of(path, LoraSpec(dim=2, targets=("q_proj", "v_prjo")), "--lora_target_modules q_proj v_prjo: --m")
    assert str(caught.value) == (
        f"--lora_target_modules q_proj v_prjo: --m {path}: no linear layer of LlamaForCausalLM has a name with "
        "'v_prjo'. Did you mean 'v_proj'? There are, for example, model.layers.0.self_attn.q_proj, "
        "model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj; 'all-linear' takes all but the output head."
    )
    with pytest.raises(UserError, match="no linear layer of LlamaForSequenceClassification has a name with 'score'"):
        AdaptedModel.of(path, LoraSpec(dim=2, targets="score"), "--x", scorer=True)


def test_a_dimension_larger_than_every_adapted_matrix_is_refused(path):
    AdaptedModel.of(path, LoraSpec(dim=32), "--x")  # keys' and values' matrices are 16 x 32
    AdaptedModel.of(path, LoraSpec(dim=16, targets=("k_proj",)), "--x")
    for targets, side in (("all-linear", 32), (("k_proj",), 16)):
        with pytest.raises(UserError) as caught:
            AdaptedModel.of(path, LoraSpec(dim=side + 1, targets=targets), "--lora_dim: --x")
        assert str(caught.value).startswith(
            f"--lora_dim: --x {path}: the dimension {side + 1} is larger than {side}, the smaller side of the largest"
        )
