"""Settings of ZeRO-3 that go by the size of a layer."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from engine.zero.config import EngineConfig, read_ds_file, with_fitting_sizes

NAMES = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")


def sizes(hidden: int, inner: int, **zero) -> list[int]:
    """The three settings for a Llama of two layers, whose file says `zero`."""
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=32)
    module = nn.Module()
    with torch.device("meta"):
        module.model = LlamaModel(config)
    fitted = with_fitting_sizes(module, {"zero_optimization": {"stage": 3, **zero}})["zero_optimization"]
    return [fitted.get(f"stage3_{name}", fitted.get(name)) for name in NAMES]


def test_there_is_room_for_the_layer_that_computes_and_the_next():
    """A layer of Llama-7B has 4 * 4096^2 + 3 * 4096 * 11008 + 2 * 4096 = 202383360 numbers."""
    assert sizes(4096, 11008) == [202383360, 3 * 202383360, 2 * 202383360]


def test_small_layers_are_fetched_several_at_a_time():
    assert sizes(64, 128) == [30_000_000, 100_000_000, 100_000_000]


@pytest.mark.parametrize("prefix", ("stage3_", ""))
def test_what_a_file_names_is_left(prefix):
    given = {f"{prefix}{name}": number for number, name in enumerate(NAMES)}
    assert sizes(4096, 11008, **given) == [0, 1, 2]


@pytest.mark.parametrize("offload", (False, True))
def test_the_shipped_files_name_none(offload):
    zero = read_ds_file(EngineConfig("actor", 3, offload))["zero_optimization"]
    assert not {f"stage3_{name}" for name in NAMES} & zero.keys()


def test_other_stages_have_none():
    config = {"zero_optimization": {"stage": 2}}
    assert with_fitting_sizes(nn.Module(), config) == config
