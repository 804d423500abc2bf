"""Which code computes attention: that it is what was asked for wherever a model is made, and what is refused early."""

import pytest
import torch

from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.memory.blueprint import blueprints
from engine.models import attention as module
from engine.models.attention import IMPLEMENTATIONS, Attention
from engine.models.hydra import load_hydra
from engine.models.loading import empty_like, load_policy, load_scorer, new_scorer
from engine.models.reading import CLASSIFIER, LANGUAGE_MODEL
from scripts.harness.models import PAD, make_causal_lm, make_scorer

EAGER = Attention("eager")


def implementation(made) -> str:
    return made.model.base_model.config._attn_implementation


def test_a_model_is_made_with_the_attention_that_was_asked_for_and_copies_have_it_too(tmp_path):
    path, scorer = make_causal_lm(tmp_path / "sft", "llama"), make_scorer(tmp_path / "reward", "llama")
    made = [
        load_policy(path, torch.float32, attention=EAGER),
        load_hydra(path, torch.float32, layers=1, attention=EAGER),
        load_scorer(scorer, torch.float32, attention=EAGER),
        new_scorer(path, torch.float32, PAD, 1, attention=EAGER),
    ]
    copies = [empty_like(one, torch.device("cpu")) for one in made]
    assert [implementation(one) for one in made + copies] == ["eager"] * 8
    assert implementation(load_policy(path, torch.float32)) == "sdpa"
    spec = EngineSpec(actor_path=str(path), critic_path=str(scorer), attention=EAGER)
    assert {role: implementation(one.module) for role, one in blueprints(spec).items()} == dict.fromkeys(
        ("actor", "critic", "reference", "reward"), "eager"
    )


def test_on_paper_kernels_that_need_a_gpu_are_torchs_own(tmp_path):
    path = make_causal_lm(tmp_path / "sft", "llama")
    spec = EngineSpec(actor_path=str(path), critic_path=None, with_reward_model=False)
    for name in ("flash_attention_2", "flash_attention_3", "flex_attention"):
        planned = blueprints(
            EngineSpec(actor_path=str(path), critic_path=None, with_reward_model=False, attention=Attention(name))
        )
        assert implementation(planned["actor"].module) == implementation(blueprints(spec)["actor"].module) == "sdpa"


def test_the_implementations_compute_the_same_of_rows_padded_on_the_left(tmp_path):
    path = make_causal_lm(tmp_path / "sft", "qwen2")
    tokens = torch.arange(4, 16).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    positions = mask.cumsum(-1) - mask
    torch_own, plain = (
        load_policy(path, torch.float32, attention=Attention(name))(tokens, mask, positions, response_length=3)[0]
        for name in ("sdpa", "eager")
    )
    assert torch.allclose(torch_own, plain, atol=1e-5)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_kernels_of_gpus_are_refused_on_cpus(tmp_path, kernel):
    path = make_causal_lm(tmp_path / "sft", "llama")
    with pytest.raises(UserError, match=f"^--attn_implementation {kernel}: it has kernels for GPUs alone.*give sdpa"):
        Attention(kernel).check(path, LANGUAGE_MODEL, "bf16", "--actor")


def test_flash_attention_is_refused_where_it_is_not_installed_or_the_dtype_is_not_its(tmp_path, monkeypatch):
    path = make_causal_lm(tmp_path / "sft", "llama")
    monkeypatch.setattr(module, "on_gpu", lambda: True)
    with pytest.raises(UserError, match="the package flash-attn is not installed"):
        Attention("flash_attention_2").check(path, LANGUAGE_MODEL, "bf16", "--actor")
    monkeypatch.setattr(module.import_utils, "is_flash_attn_2_available", lambda: True)
    with pytest.raises(UserError, match="computes in fp16 or bf16, and this run in fp32"):
        Attention("flash_attention_2").check(path, LANGUAGE_MODEL, "fp32", "--actor")
    Attention("flash_attention_2").check(path, LANGUAGE_MODEL, "bf16", "--actor")


def test_flash_attention_is_refused_on_gpus_that_it_has_no_kernels_for(tmp_path, monkeypatch):
    path = make_causal_lm(tmp_path / "sft", "llama")
    monkeypatch.setattr(module, "on_gpu", lambda: True)
    monkeypatch.setattr(module.import_utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(module, "capability", lambda: (7, 0))  # V100
    with pytest.raises(UserError, match="of compute capability 8.0 and newer, and this one has 7.0. Leave it out"):
        Attention("flash_attention_2").check(path, LANGUAGE_MODEL, "fp16", "--actor")
    for usual in ("auto", "sdpa", "eager"):
        Attention(usual).check(path, LANGUAGE_MODEL, "fp16", "--actor")
    monkeypatch.setattr(module, "capability", lambda: (8, 0))
    Attention("flash_attention_2").check(path, LANGUAGE_MODEL, "fp16", "--actor")


def test_a_family_without_an_implementation_is_refused_with_those_that_it_has(tmp_path):
    path = make_causal_lm(tmp_path / "sft", "bloom")
    with pytest.raises(UserError, match="--actor .*of type 'bloom', of which .* no such attention.* or give eager\\."):
        Attention("sdpa").check(path, LANGUAGE_MODEL, "fp32", "--actor")
    Attention("auto").check(path, LANGUAGE_MODEL, "fp32", "--actor")
    Attention("eager").check(path, CLASSIFIER, "fp32", "--critic")


def test_all_implementations_can_be_named():
    assert set(IMPLEMENTATIONS) == {
        "auto",
        "sdpa",
        "eager",
        "flash_attention_2",
        "flash_attention_3",
        "flex_attention",
    }
