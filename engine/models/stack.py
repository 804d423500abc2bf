"""The stack of decoder layers within a model, and how gradients reach it where nothing before it trains."""

import torch
from torch import nn
from transformers import PreTrainedModel


def decoder_stack(model: PreTrainedModel) -> str | None:
    """The name of the longest ModuleList of decoder layers (the classes in `_no_split_modules`), or None."""
    kinds = set(model._no_split_modules or [])
    lists = {
        name: len(part)
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) and {type(layer).__name__ for layer in part} <= kinds
    }
    return max(lists, key=lambda name: lists[name], default=None)


def ask_for_gradient(_: nn.Module, inputs: tuple) -> None:
    """Have the backward pass go through to the input of the first layer that trains, though nothing before it does.

    A forward pre-hook. ZeRO-3, where it gathers a layer in one piece, takes the layer's backward pass to be over when
    the gradient of its input is there. An input without a gradient would look like that from the start: weights would
    be freed too early.
    """
    if torch.is_grad_enabled() and not inputs[0].requires_grad:
        inputs[0].requires_grad_(True)
