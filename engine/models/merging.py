"""Adapters merged into their models' matrices: W + alpha / dim * B A in float32, cast to W's dtype."""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine import distributed
from engine.models.adapter_folders import AdapterFolder
from engine.zero.gathering import gathered_params, set_parameter


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, adapter: AdapterFolder) -> None:
    """Add an adapter to the matrices of its base, partitioned or not, one after the other (all ranks call this)."""
    for name, (a, b) in adapter.factors().items():
        layer = model.get_submodule(name)
        change = update(a, b, adapter.scaling(name, a.shape[0]), transposed=isinstance(layer, Conv1D))
        with gathered_params([layer.weight]):
            whole = merged(layer.weight, change.to(distributed.device()))
        set_parameter(layer.weight, whole)


def update(a: Tensor, b: Tensor, scaling: float, transposed: bool) -> Tensor:
    """scaling * B A of factors A (dim, in) and B (out, dim), in float32; transposed: (in, out), as Conv1D has it."""
    change = scaling * (b.float() @ a.float())
    return change.T if transposed else change


def merged(weight: Tensor, change: Tensor) -> Tensor:
    """The sum of a matrix and its update, in the matrix's dtype."""
    return (weight.float() + change.to(weight.device)).to(weight.dtype)
