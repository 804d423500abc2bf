"""Passes on paper: a few layers stand for many, in each family and way to train."""

import pytest

from engine.models.config_and_tokenizer import LANGUAGE_MODEL
from engine.models.lora import LoraSpec
from scripts.harness.models import family_config, make_config
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
