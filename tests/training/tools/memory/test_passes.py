"""Passes on paper: a few layers stand for many, in each family and way to train; packed rows as they are counted."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

from engine.distributed import ALONE, RankGroup
from engine.experience import position_ids
from engine.models.attention import Attention
from engine.models.config_and_tokenizer import CLASSIFIER, LANGUAGE_MODEL
from engine.models.lora import LoraSpec
from engine.models.policy import Policy, Scorer
from scripts.harness.models import family_config, make_config
from tests.engine.meters import LiveBytes
from tests.training.tools.memory.configurations import llama
from training.tools.memory import passes
from training.tools.memory.meta_model import built
from training.tools.memory.passes import forward_pass, training_pass


# Of Mixtral's experts torch's meta device has no product in float32.
@pytest.mark.parametrize(
    "family, adapted", [("llama", False), ("opt", True), ("gpt2", True), ("bloom", False), ("mixtral", False)]
)
def test_a_few_layers_stand_for_many(family, adapted, tmp_path, monkeypatch):
    config = make_config(family, layers=6) if family != "mixtral" else family_config(family)
    config.num_hidden_layers = 6
    config.save_pretrained(tmp_path)
    lora = LoraSpec(dim=4, only=True) if adapted else None
    how = {"lora": lora, "checkpointing": not adapted, "dtype": "bf16", "trust_remote_code": False}
    model = built("actor", str(tmp_path), LANGUAGE_MODEL, True, **how)

    def peaks() -> list[int]:
        training_pass.cache_clear()
        forward_pass.cache_clear()
        sizes = model, 4, 48, 24
        return [training_pass(*sizes), training_pass(*sizes, with_entropy=True), forward_pass(*sizes)]

    short = peaks()
    monkeypatch.setattr(passes, "MORE", 6)
    assert peaks() == short


@pytest.mark.parametrize("kind", [LANGUAGE_MODEL, CLASSIFIER])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_rows_are_planned_without_a_mask_of_all_pairs(kind, checkpointing, tmp_path):
    """Two rows of 1,024 tokens: a mask of all pairs would take as much as the rest."""
    rows, length = 2, 1024
    packed = Attention(packing="packed")
    how = {"dtype": "fp32", "trust_remote_code": False, "checkpointing": checkpointing, "attention": packed}
    model = built("actor", llama(tmp_path), kind, True, **how)
    assert model.module.packs
    real = measured_pass(tmp_path, kind, rows, length, checkpointing)
    assert training_pass(model, rows, length, length - 1) == pytest.approx(real, rel=0.1)


def measured_pass(
    path: str | Path, kind: str, rows: int, length: int, checkpointing: bool, group: RankGroup = ALONE
) -> int:
    """The bytes at the peak of a forward and backward pass over packed rows, which is made for real."""
    packed = Attention(packing="packed")
    config = AutoConfig.from_pretrained(path)
    config.num_labels = 1
    made = (AutoModelForCausalLM if kind == LANGUAGE_MODEL else AutoModelForSequenceClassification).from_config(
        config, **packed.prepare(LlamaForCausalLM, config, torch.float32)
    )
    module = Policy(made) if kind == LANGUAGE_MODEL else Scorer(made)
    module.pack(packed.packs_rows_of(made))
    assert module.packs
    module.split(group)
    if checkpointing:
        module.checkpoint_activations()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ids = torch.ones(rows, length, dtype=torch.int64)
    given = ids, ids, position_ids(ids)
    with LiveBytes(known=module.parameters()) as live:
        output = module(*given, response_length=length - 1)[0] if kind == LANGUAGE_MODEL else module(*given)
        output.sum().backward()
    return live.peak
