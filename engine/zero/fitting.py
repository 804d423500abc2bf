"""Settings of DeepSpeed's that go by the model's own sizes, where a file does not name them."""

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

from engine.zero.gathering import full_numel

LIVE, AHEAD = 100_000_000, 30_000_000
"""The least numbers that may be whole at once, and that are fetched ahead."""


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a Policy or Scorer, by the names that transformers has for what is not to be split."""
    names = set(getattr(getattr(module, "model", None), "_no_split_modules", None) or [])
    return [part for part in module.modules() if type(part).__name__ in names]


def with_fitting_sizes(module: nn.Module, ds_config: dict) -> dict:
    """The configuration, with room at stage 3 for the layer that computes, the next, which is fetched meanwhile, and
    the one before.

    A layer of a Llama of 7 billion numbers has 2e8 of them: with room for 1e8 none is fetched before its turn. Small
    layers are fetched several at a time.
    """
    zero = ds_config["zero_optimization"]
    if zero.get("stage") != 3:
        return ds_config
    layers = decoder_layers(module)
    layer = max((sum(full_numel(parameter) for parameter in one.parameters()) for one in layers), default=0)
    sizes = {
        "stage3_prefetch_bucket_size": max(AHEAD, layer),
        "stage3_max_live_parameters": max(LIVE, 3 * layer),
        "stage3_max_reuse_distance": max(LIVE, 2 * layer),
    }
    unnamed = {name: size for name, size in sizes.items() if name.removeprefix("stage3_") not in zero}
    return {**ds_config, "zero_optimization": {**unnamed, **zero}}


def with_fitting_bucket(module: nn.Module, ds_config: dict) -> dict:
    """The configuration, with buckets of gradients no larger than all gradients together.

    DeepSpeed allocates a whole bucket, at stage 3 for good, however little there is to be reduced: a small model, or
    adapters. What does fit into one bucket is reduced in one, as before.
    """
    zero = ds_config["zero_optimization"]
    trained = sum(full_numel(parameter) for parameter in module.parameters() if parameter.requires_grad)
    given = zero.get("reduce_bucket_size", DeepSpeedZeroConfig().reduce_bucket_size)
    return {**ds_config, "zero_optimization": {**zero, "reduce_bucket_size": min(int(given), trained)}}
