"""Loads a Hugging Face model directly into ZeRO-3 partitions. No other file uses HfDeepSpeedConfig."""

import contextlib
from collections.abc import Iterator

import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from engine.zero.extensions import load_for
from engine.zero.gathering import is_partitioned, own_hpz_groups

_TORCH_LINEAR = nn.functional.linear


@contextlib.contextmanager
def partitioned_loading(ds_config: dict | None) -> Iterator[None]:
    """Within this context models load directly into ZeRO-3 partitions. If the configuration is for another stage, the
    context does nothing.

    The context sets a switch of transformers that is global to the process. If the switch stayed on, models created
    later, such as a whole copy for rollouts, would be partitioned too.
    """
    if ds_config is None or ds_config.get("zero_optimization", {}).get("stage") != 3:
        yield
        return
    load_for(ds_config)
    switch = HfDeepSpeedConfig(ds_config)
    try:
        with own_hpz_groups(ds_config):
            yield
    finally:
        unset_hf_deepspeed_config()
        del switch
        if nn.functional.linear is zero3_linear_wrap:
            nn.functional.linear = _linear


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Replaces torch's linear function once a model has been partitioned.

    DeepSpeed replaces torch's linear function, for the whole process, by a function that always does what
    _PartitionedLinear does. With small models, generation spends a third of its time in that function. `_linear` uses
    _PartitionedLinear only for weights that will be gathered again for the backward pass.
    """
    if torch.is_grad_enabled() and is_partitioned(weight):
        return _PartitionedLinear.apply(input, weight, bias)
    return _TORCH_LINEAR(input, weight, bias)


class _PartitionedLinear(torch.autograd.Function):
    """A linear layer that saves the weight parameter itself for the backward pass, and not a view of the memory that
    holds the gathered weight. ZeRO-3 frees that memory after the forward pass, and gathers the weight again for the
    backward pass."""

    @staticmethod
    def forward(ctx, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return _TORCH_LINEAR(inputs, weight, bias)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        inputs, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            flat.t() @ inputs.flatten(0, -2) if ctx.needs_input_grad[1] else None,
            flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None,
        )
