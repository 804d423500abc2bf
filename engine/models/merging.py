"""Adapters merged into their models' matrices, in place or on the way to a file: W + alpha / dim * B A in float32, cast
to W's dtype."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine import distributed
from engine.lazy import Lazy
from engine.models.adapter_folders import HEAD, AdapterFolder
from engine.models.adapters import Adapters, update
from engine.models.backbone import Backbone
from engine.optim import is_factor
from engine.zero.gathering import gathered_params, set_parameter, whole_weights

BASE = ".base_layer."  # peft's name for the layer within an adapted one


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, adapter: AdapterFolder) -> None:
    """Add an adapter to the matrices of its base, partitioned or not, one after the other (all ranks call this)."""
    for name, (a, b) in adapter.factors().items():
        layer = model.get_submodule(name)
        change = update(a, b, adapter.scaling(name, a.shape[0]), transposed=isinstance(layer, Conv1D))
        with gathered_params([layer.weight]):
            whole = merged(layer.weight, change.to(distributed.device()))
        set_parameter(layer.weight, whole)


def merged_state(module: Backbone, state: Mapping[str, Tensor], role: str | None = None) -> dict[str, Tensor]:
    """The weights of a model with its adapter merged, by the names that it has without.

    Each is computed when it is asked for, from one matrix and its factors (`Lazy`). An adapted head that is the
    embedding too becomes a weight of its own.

    state: of `module.model`, by name (`lent_state`). role: whose adapter; by default the own one.
    """
    adapters = module.adapters
    if adapters is None:
        return dict(state)
    found = {name: tensor for name, tensor in state.items() if not is_factor(name)}
    for name, tensor in list(found.items()):
        layer, within, rest = name.rpartition(BASE)
        if within:
            del found[name]
            fill = partial(_fill_merged, adapters, tensor, state, layer, role or adapters.own)
            found[f"{layer}.{rest}"] = Lazy.of(tuple(tensor.shape), tensor.dtype, fill) if rest == "weight" else tensor
    head = adapters.tied_head
    if head is not None:  # whose matrix came by the embedding's name, which keeps it as it is
        shared = adapters.layers[head].get_base_layer().weight
        tensor = state[next(name for name, weight in module.model.named_parameters() if weight is shared)]
        fill = partial(_fill_merged, adapters, tensor, state, head, role or adapters.own)
        found[f"{head}.weight"] = Lazy.of(tuple(tensor.shape), tensor.dtype, fill)
    return found


@torch.no_grad()
def merged_weights(module: Backbone) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model with its own adapter merged, by the names that it has without, on every rank's device, a
    bucket at a time (all ranks call this, and take all of them).

    As `merged_state`, for what takes the weights of an update while training goes on.
    """
    model, adapters = module.model, module.adapters
    if adapters is None:
        yield from whole_weights(model)
        return
    own = adapters.active[adapters.own]
    names = [name for name, _ in model.named_parameters()]
    factors = dict(whole_weights(model, {name for name in names if is_factor(name) and name.split(".")[-2] in own}))

    def changed(layer: str, weight: Tensor) -> Tensor:
        adapted = adapters.layers[layer]
        for adapter in own:
            if adapter in adapted.lora_A:
                a, b = (factors[f"{layer}.lora_{factor}.{adapter}.weight"] for factor in "AB")
                weight = merged(weight, update(a, b, adapted.scaling[adapter], adapted.fan_in_fan_out))
        return weight

    head = adapters.tied_head
    shared = None if head is None else adapters.layers[head].get_base_layer().weight
    tied = next((name for name, weight in model.named_parameters() if weight is shared), None)
    for name, weight in whole_weights(model, {name for name in names if not is_factor(name)}):
        layer, within, rest = name.rpartition(BASE)
        if within:
            yield f"{layer}.{rest}", changed(layer, weight) if rest == "weight" else weight
        else:
            yield name, weight
        if head is not None and name == tied:
            yield f"{head}.weight", changed(head, weight)
        del weight  # before the next bucket is gathered


def adapter_state(module: Backbone, state: Mapping[str, Tensor], role: str | None = None) -> dict[str, Tensor]:
    """The factors of a role's adapter, and a scorer's head, by peft's names within the model.

    state, role: as for `merged_state`.
    """
    assert module.adapters is not None
    ending = f".{role or module.adapters.own}.weight"
    factors = {name: tensor for name, tensor in state.items() if is_factor(name) and name.endswith(ending)}
    found = {f"{name.removesuffix(ending)}.weight": tensor for name, tensor in factors.items()}
    return found | {name: tensor for name, tensor in state.items() if name.startswith(f"{HEAD}.")}


def adapter_holds_all(module: Backbone) -> bool:
    """Whether nothing trains that an adapter's folder has no place for: all but factors and a score head is frozen."""
    trained = {name for name, parameter in module.model.named_parameters() if parameter.requires_grad}
    return all(is_factor(name) or name.startswith(f"{HEAD}.") for name in trained)


def merged(weight: Tensor, change: Tensor) -> Tensor:
    """The sum of a matrix and its update, in the matrix's dtype."""
    return (weight.float() + change.to(weight.device)).to(weight.dtype)


@torch.no_grad()
def _fill_merged(
    adapters: Adapters, matrix: Tensor, state: Mapping[str, Tensor], name: str, role: str, target: Tensor
) -> None:
    layer, weight = adapters.layers[name], torch.empty_like(target, device="cpu")
    weight.copy_(matrix)
    for adapter in adapters.active[role]:
        if adapter not in layer.lora_A:  # of another role's layers
            continue
        a, b = (state[f"{name}.lora_{factor}.{adapter}.weight"].float() for factor in "AB")
        weight = merged(weight, update(a, b, layer.scaling[adapter], layer.fan_in_fan_out))
    target.copy_(weight)
