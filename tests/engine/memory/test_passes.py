"""Passes on paper: a few layers stand for many, in each family and way to train."""

import pytest

from engine.memory import passes
from engine.memory.blueprint import Blueprint, blueprints
from engine.memory.passes import Rows, decoding_passes, scoring_pass, training_pass
from engine.models.lora import LoraSpec
from scripts.harness.models import family_config, make_config
from tests.engine.memory.configurations import VOCABULARY, llama, spec_of

ROWS = Rows(4, 24, 24)


def counts(models: dict[str, Blueprint]) -> list[int]:
    for counted in (training_pass, scoring_pass, decoding_passes):
        counted.cache_clear()
    actor, critic = models["actor"], models["critic"]
    peaks = [training_pass(actor, ROWS), training_pass(critic, ROWS), scoring_pass(actor, ROWS)]
    return [peak.total() for peak in [*peaks, decoding_passes(actor, ROWS, 48)]]


# Bloom takes no ready-made masks. Of Mixtral's experts torch's meta device has no product in float32.
@pytest.mark.parametrize(
    "family, adapted",
    [("llama", False), ("opt", True), ("gpt2", True), ("bloom", False), ("mixtral", False)],
)
def test_a_few_layers_stand_for_many(family, adapted, tmp_path, monkeypatch):
    config = make_config(family, layers=6) if family != "mixtral" else family_config(family)
    config.num_hidden_layers = 6
    config.save_pretrained(tmp_path)
    lora = LoraSpec(dim=4, only=True) if adapted else None
    models = blueprints(
        spec_of(str(tmp_path), 0, actor_lora=lora, critic_lora=lora, actor_gradient_checkpointing=not adapted)
    )
    short = counts(models)
    assert all(len(model._stack) == 6 for model in models.values())  # as they were
    monkeypatch.setattr(passes, "MORE", 6)
    assert counts(models) == short


def test_logits_are_those_of_the_planned_gpus_chunks(tmp_path):
    """40 rows of 990 response tokens have 39.6 million logits. Of a chunk there are three float32 tensors when most are
    alive, and without gradients five of a smaller one (tests/engine/test_memory.py): 2 ** 24 logits are those of 16,777
    positions, and as many as 30 GB have KiB those of 29,296."""
    actor, rows = blueprints(spec_of(llama(tmp_path), 0, dtype="fp32"))["actor"], Rows(40, 24, 990)
    for gpu, positions in ((0, 16_777), (30_000_000_000, 29_296), (85_000_000_000, 39_600)):
        assert training_pass(actor, rows, gpu=gpu)["logits"] == 3 * 4 * positions * VOCABULARY
    assert scoring_pass(actor, rows)["logits"] == 5 * 4 * 16_777 * VOCABULARY
