"""Recorded passes over single tokens answer as the model does, or are not taken."""

import warnings

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    Qwen3NextConfig,
)

from engine.errors import UserError
from engine.rollout.cache import SlotCache
from engine.rollout.decode import Sampler
from engine.rollout.passes import Passes, RecordedPasses, check_attention, passes_of, takes_slot_masks
from scripts.harness.models import EOS, make_causal_lm, make_tokenizer
from tests.engine.rollout.test_decode import (
    BATCH,
    FAMILIES,
    INDICES,
    PROMPTS,
    READY,
    SAMPLING,
    answers,
    loaded,
    plainly,
)
from tests.fake_flash import FakeFlash
from tests.plain_sampling import plain_answer


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    return {family: loaded(make_causal_lm(tmp_path_factory.mktemp(family), family)) for family in FAMILIES}


def taken(model: nn.Module, decoding: str) -> Passes:
    with torch.inference_mode():
        return passes_of(model, SlotCache(), takes_slot_masks(model), decoding)


@pytest.mark.parametrize("rows_at_once", (None, 3))
@pytest.mark.parametrize("family", sorted(READY))
def test_recorded_passes_answer_alike(models, family, rows_at_once):
    """For any number of rows and slots, moved to the left or not, and with the weights as they are by then."""
    model, sampler = models[family], Sampler(make_tokenizer(), rows_at_once, decoding="recorded")
    calls = []
    hook = model.register_forward_pre_hook(
        lambda _, args, named: calls.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        assert answers(sampler.responses(model, BATCH, SAMPLING)) == plainly(model, SAMPLING)
        assert type(sampler._passes) is RecordedPasses
        calls.clear()
        more = sampler.responses(model, BATCH.repeat(2), SAMPLING)
        single = calls.count(1)
    finally:
        hook.remove()
    assert answers(more) == [
        plain_answer(model, prompt, index, sample, SAMPLING)
        for prompt, index in zip(PROMPTS, INDICES)
        for sample in range(2)
    ]
    assert single < 5 < sampler.row_steps  # prompts of one token go through the model, and no other single token
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        for name, p in model.named_parameters():  # half are written to, half are put elsewhere
            changed = before[name] + 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
            if len(name) % 2:
                p.data.copy_(changed)
            else:
                p.data = changed
        expected = plainly(model, SAMPLING)
        assert expected != answers(more.select(more.samples == 0))
        assert answers(sampler.responses(model, BATCH, SAMPLING)) == expected
    finally:
        for name, p in model.named_parameters():
            p.data = before[name]


def test_auto_records_on_cpus_and_says_where_it_cannot(models):
    for family in FAMILIES:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            passes = taken(models[family], "auto")
        assert type(passes) is (RecordedPasses if family in READY else Passes)
        assert (passes.decoding, passes.fallback) == (
            ("recorded", "") if family in READY else ("plain", "it makes the mask of each token itself")
        )
        assert len([each for each in said if "cannot be recorded" in str(each.message)]) == (family not in READY)


def test_without_torchs_recordings_the_models_own_code_reads_tokens(models, monkeypatch):
    monkeypatch.delattr(torch.jit, "trace")
    sampler = Sampler(make_tokenizer(), decoding="auto")
    assert answers(sampler.responses(models["llama"], BATCH, SAMPLING)) == plainly(models["llama"], SAMPLING)
    assert type(sampler._passes) is Passes


@pytest.mark.parametrize("family", sorted(READY))
def test_a_padding_token_other_than_the_first_is_no_hindrance(family, tmp_path):
    """An embedding that is told of one looks at its own size."""
    model = loaded(make_causal_lm(tmp_path, family, pad_is_eos=True))
    assert model.config.pad_token_id == EOS > 0
    sampler = Sampler(make_tokenizer(pad_is_eos=True), decoding="auto")
    assert answers(sampler.responses(model, BATCH, SAMPLING)) == plainly(model, SAMPLING)
    assert type(sampler._passes) is RecordedPasses


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - READY))
@pytest.mark.parametrize("decoding", ("recorded", "graphs"))
def test_families_that_need_their_own_masks_are_named(models, family, decoding):
    with pytest.warns(UserWarning, match=f"{type(models[family]).__name__} cannot be {decoding}"):
        assert type(taken(models[family], decoding)) is Passes


class Odd(nn.Module):
    """A model whose code does something that no recording holds."""

    def __init__(self, model: nn.Module, oddity):
        super().__init__()
        self.model, self.oddity, self.config = model, oddity, model.config

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, **named):
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **named,
        )
        output.logits = self.oddity(output.logits, position_ids)
        return output


@pytest.mark.parametrize(
    "oddity, reason",
    [
        (lambda logits, positions: -logits if positions.max() > 40 else logits, "looks at what is computed"),
        (lambda logits, positions: logits + logits.sum().item(), "looks at what is computed"),
        (lambda logits, positions: logits * (2.0 if torch.jit.is_tracing() else 1.0), "computes something else"),
        (lambda logits, positions: logits if not torch.jit.is_tracing() else next(iter(())), "StopIteration"),
        (
            lambda logits, positions: logits.reshape(
                logits.untyped_storage().nbytes() // (4 * logits.shape[-1]), 1, -1
            ),
            "its recording (fails|computes something else)",
        ),
    ],
)
def test_code_that_no_recording_holds_is_found_out(models, oddity, reason):
    """It goes by what it computes, which in the first case no trial would show; by who asks; or by shapes."""
    model = Odd(models["llama"], oddity).eval()
    with pytest.warns(UserWarning, match=reason):
        assert type(taken(model, "recorded")) is Passes


def test_eager_attention_is_not_given_ready_masks(tmp_path):
    """It adds a mask to the scores: booleans would hide nothing."""
    model = AutoModelForCausalLM.from_pretrained(
        make_causal_lm(tmp_path, "llama"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert not takes_slot_masks(model)
    assert answers(Sampler(make_tokenizer(), decoding="auto").responses(model, BATCH, SAMPLING)) == plainly(
        model, SAMPLING
    )


def test_flash_attention_answers_as_torchs_own(models, monkeypatch):
    """A token's mask has holes where rows came and went; it is told of them as of padding."""
    flash, expected = FakeFlash(monkeypatch), plainly(models["llama"], SAMPLING)
    monkeypatch.setattr(models["llama"].config, "_attn_implementation_internal", "flash_attention_2")
    assert not takes_slot_masks(models["llama"])
    sampler = Sampler(make_tokenizer(), rows_at_once=5, decoding="plain")
    assert answers(sampler.responses(models["llama"], BATCH, SAMPLING)) == expected
    assert len(flash.calls) > 40 and {longest for _, longest in flash.calls} > {1}


@pytest.mark.parametrize("config", (MambaConfig(), Qwen3NextConfig(), MiniMaxConfig()), ids=lambda c: c.model_type)
def test_actors_that_keep_a_state_are_refused(tmp_path, config):
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"^--actor: .* is a {config.model_type} model, some layers of which keep a "):
        check_attention(str(tmp_path), "--actor")


@pytest.mark.parametrize("config", (LlamaConfig(), Gemma2Config(), BloomConfig()), ids=lambda c: c.model_type)
def test_actors_of_attention_alone_are_not(tmp_path, config):
    config.save_pretrained(tmp_path)
    check_attention(str(tmp_path), "--actor")


def test_a_sampler_at_rest_holds_neither_the_model_nor_memory(models):
    sampler = Sampler(make_tokenizer(), decoding="recorded")
    sampler.responses(models["llama"], BATCH, SAMPLING)
    sampler.release_memory()
    assert sampler._passes is None and not sampler.cache.layers
    assert answers(sampler.responses(models["llama"], BATCH, SAMPLING)) == plainly(models["llama"], SAMPLING)
