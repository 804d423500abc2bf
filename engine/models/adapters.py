"""Manages the LoRA adapters within a model, and chooses the adapter that computes."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from engine.models.heads import AdaptedLogProbHead, LogProbHead


class Adapters:
    """The adapters of a model. Several roles (actor, reference, ...) compute on the same base model, each with an
    adapter of its own or without one.

    An adapter has the name of its role.

    own: the role that trains.
    configs: {role: peft's configuration of the role's adapter}.
    frozen: the other roles that have an adapter; all remaining roles compute without an adapter.
    """

    def __init__(
        self,
        model: Any,
        own: str,
        configs: Mapping[str, LoraConfig],
        frozen: Collection[str] = (),
    ):
        self.model = model
        self.own = own
        self.configs = dict(configs)
        self.frozen = tuple(frozen)
        self.layers: dict[str, Any] = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)
        }

    def select(self, role: str | None) -> None:
        """Compute in this role until the next call. None: in the role `own`.

        The role stays chosen after the forward pass, because with activation checkpointing the backward pass has to
        compute the same activations again.
        """
        role = role or self.own
        names = [role] if role == self.own or role in self.frozen else []
        for layer in self.layers.values():
            layer._active_adapter = names  # peft's own setter would freeze inactive adapters

    @torch.no_grad()
    def merged_matrix(
        self, name: str, matrix: Tensor, factors: Mapping[str, Tensor], role: str | None = None
    ) -> Tensor:
        """The matrix of a layer plus the update of a role, by default of the role `own`. If the role has no update in
        this layer, the matrix is returned unchanged. factors: {name: factor} of the model."""
        role, layer = role or self.own, self.layers[name]
        if role not in layer.lora_A:
            return matrix
        a, b = (factors[f"{name}.lora_{factor}.{role}.weight"] for factor in "AB")
        return merged(matrix, update(a, b, layer.scaling[role], layer.fan_in_fan_out))

    @property
    def tied_head(self) -> str | None:
        """The name of the output head if the head has an adapter and its matrix is also the embedding; else None.

        The update changes the head only, so that after merging, head and embedding are two different matrices.
        """
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        tied = [name for name, layer in self.layers.items() if layer is head and layer.weight is embedding.weight]
        return tied[0] if tied else None

    def targets(self) -> list[str]:
        """The names of the adapted layers within the transformers model."""
        return list(self.layers)

    def factors(self, adapter: str | None = None) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """{layer's name: (A, B)} of an adapter, by default the adapter of the role `own`."""
        adapter = adapter or self.own
        return {
            name: (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
            for name, layer in self.layers.items()
            if adapter in layer.lora_A
        }


def is_factor(name: str) -> bool:
    """Whether a parameter with this name is one of the two factors of a LoRA update."""
    return ".lora_A." in name or ".lora_B." in name


def inject(model: Any, configs: Mapping[str, LoraConfig]) -> None:
    """Inject adapters into a model. configs: {name of the adapter: peft's configuration}. The caller still has to fill
    in the factors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are intended
        warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings=True`")  # saving unties the head
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # peft itself sees the kind of each layer
        for name, config in configs.items():
            inject_adapter_in_model(config, model, adapter_name=name)
    head = model.get_output_embeddings()
    if isinstance(head, LoraLayer) and isinstance(head.get_base_layer(), LogProbHead):
        head.__class__ = AdaptedLogProbHead  # changed in place, as the head's own class was


def merged(weight: Tensor, change: Tensor) -> Tensor:
    """The sum of a matrix and its update, in the matrix's dtype."""
    return (weight.float() + change.to(weight.device)).to(weight.dtype)


def update(a: Tensor, b: Tensor, scaling: float, transposed: bool) -> Tensor:
    """The update scaling * B A, (out, in), computed in float32 from the factors A (dim, in) and B (out, dim).
    transposed: whether to return (in, out), the layout of Conv1D."""
    change = scaling * (b.float() @ a.float())
    return change.T if transposed else change
