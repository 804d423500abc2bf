"""Buffers that no weight file holds: rotary frequencies, tables of positions, scales."""

import torch
from accelerate import init_empty_weights
from transformers import PreTrainedModel


@torch.no_grad()
def restore_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a Hugging Face model the buffers that it has where it is not partitioned.

    While ZeRO-3 builds a model, every tensor of floating-point numbers that is made is rounded to the weights' dtype
    (deepspeed.zero.Init). transformers computes rotary frequencies in float32, and not all its versions do so again
    once the model stands: rounded to bfloat16 they are off by up to 0.4 %, by which a token at position 1,000 turns as
    one four places from it should.

    Args:
        dtype: of the weights.
    """
    here, stored = dict(model.named_buffers()), model.state_dict().keys()
    names = [name for name in here if name not in stored]
    if not names:
        return
    with torch.device("meta"):
        kept_in = dict(type(model)._from_config(model.config, dtype=dtype).named_buffers())
    with init_empty_weights(include_buffers=False):
        exact = dict(type(model)._from_config(model.config, dtype=torch.float32).named_buffers())
    for name in names:
        owner, _, last = name.rpartition(".")
        buffer = exact[name].to(here[name].device, kept_in[name].dtype)
        setattr(model.get_submodule(owner), last, buffer)
