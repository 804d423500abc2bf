"""The LoRA adapters within a model: which there are, and which of them compute."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from engine.models.heads import AdaptedLogProbHead, LogProbHead


class Adapters:
    """What makes of one model several: adapters, and the roles that compute with them.

    own: the role that trains, whose adapter has its name. configs: peft's descriptions, by the adapters' names. active:
    by other roles' names, the adapters that they compute with; a role that is not in it computes with none, which is
    the model as it was loaded. merged: the names of the layers whose matrices hold the own role's updates at present.
    """

    def __init__(
        self,
        model: Any,
        own: str,
        configs: Mapping[str, LoraConfig],
        active: Mapping[str, Sequence[str]] | None = None,
    ):
        self.model, self.own, self.configs = model, own, dict(configs)
        self.active = {own: [own]} | {role: list(names) for role, names in (active or {}).items()}
        self.layers: dict[str, Any] = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)
        }
        self.merged: frozenset[str] = frozenset()

    def within(self, model: nn.Module) -> "Adapters":
        """Adapters like these in another model of the architecture, which gets them; their factors are still to be
        filled in."""
        inject(model, self.configs)
        return Adapters(model, self.own, self.configs, self.active)

    def take(self, role: str | None) -> None:
        """Compute as this role (None: the own one) from now on.

        Until the next call, and not for a forward pass alone: where activations are computed again in the backward
        pass, that follows and has to compute the same.
        """
        assert not self.merged or role in (None, self.own), (
            f"asked to be the {role}, with the {self.own}'s updates merged"
        )
        names = self.active.get(role or self.own, [])
        for name, layer in self.layers.items():
            # peft's own setter makes what is inactive untrained
            layer._active_adapter = [] if name in self.merged else names

    @torch.no_grad()
    def merge(self) -> None:
        """Add the own role's updates to the matrices, rounded to their dtype, so that it computes without the factors.

        For a copy of a model, unpartitioned and in eval mode: the matrices are lost. What is tied to another module's
        weight goes on with its factors.
        """
        uses = Counter(weight for part in self.model.modules() for weight in part.parameters(recurse=False))
        for name, layer in self.layers.items():
            weight = layer.get_base_layer().weight
            if uses[weight] == 1:
                weight.copy_(weight + self.update(name))
                self.merged |= {name}
        self.take(None)

    def unmerge(self) -> list[str]:
        """Have the factors compute again, and return the names, within the model, of the matrices to be put back."""
        names, self.merged = [f"{name}.base_layer.weight" for name in self.merged], frozenset()
        self.take(None)
        return names

    @torch.no_grad()
    def update(self, name: str) -> Tensor:
        """What the own role adds to the matrix of a layer, in that one's layout and float32."""
        layer, total = self.layers[name], torch.zeros(())
        for adapter in self.active[self.own]:
            if adapter not in layer.lora_A:  # another role's alone
                continue
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            change = update(a, b, layer.scaling[adapter], layer.fan_in_fan_out)
            total = total.to(change) + change
        return total

    @property
    def tied_head(self) -> str | None:
        """The name of the output head, where it is adapted and its matrix is the embedding too.

        The update is the head's alone, so that a merged model has two matrices.
        """
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        tied = [name for name, layer in self.layers.items() if layer is head and layer.weight is embedding.weight]
        return tied[0] if tied else None

    def targets(self) -> list[str]:
        """The names of the adapted layers within the transformers model."""
        return list(self.layers)

    def factors(self, adapter: str | None = None) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """(A, B) of an adapter (the own one by default), by the names of their layers."""
        adapter = adapter or self.own
        return {
            name: (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
            for name, layer in self.layers.items()
            if adapter in layer.lora_A
        }


def inject(model: Any, configs: Mapping[str, LoraConfig]) -> None:
    """Put adapters of these names and descriptions into a model; their factors are still to be filled in."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are what is wanted
        warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings=True`")  # which saving unties
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # one word for all; peft sees what each layer is
        for name, config in configs.items():
            inject_adapter_in_model(config, model, adapter_name=name)
    head = model.get_output_embeddings()
    if isinstance(head, LoraLayer) and isinstance(head.get_base_layer(), LogProbHead):
        head.__class__ = AdaptedLogProbHead  # in place, as the head itself


def update(a: Tensor, b: Tensor, scaling: float, transposed: bool) -> Tensor:
    """scaling * B A of factors A (dim, in) and B (out, dim), in float32; transposed: (in, out), as Conv1D has it."""
    change = scaling * (b.float() @ a.float())
    return change.T if transposed else change
