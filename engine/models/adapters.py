"""The LoRA adapters within a model: which there are, and which of them compute."""

from collections.abc import Mapping, Sequence
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn


class Adapters:
    """What makes of one model several: adapters, and the roles that compute with them.

    own: the role that trains, whose adapter has its name. configs: peft's descriptions, by the adapters' names. active:
    by other roles' names, the adapters that they compute with; a role that is not in it computes with none, which is
    the model as it was loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        own: str,
        configs: Mapping[str, LoraConfig],
        active: Mapping[str, Sequence[str]] | None = None,
    ):
        self.own, self.configs = own, dict(configs)
        self.active = {own: [own]} | {role: list(names) for role, names in (active or {}).items()}
        self.layers: dict[str, Any] = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)
        }

    def within(self, model: nn.Module) -> "Adapters":
        """Adapters like these in another model of the architecture, which gets them; their factors are still to be
        filled in."""
        for name, config in self.configs.items():
            inject_adapter_in_model(config, model, adapter_name=name)
        return Adapters(model, self.own, self.configs, self.active)

    def take(self, role: str | None) -> None:
        """Compute as this role (None: the own one) from now on.

        Until the next call, and not for a forward pass alone: where activations are computed again in the backward
        pass, that follows and has to compute the same.
        """
        names = self.active.get(role or self.own, [])
        for layer in self.layers.values():
            layer._active_adapter = names  # peft's own setter makes what is inactive untrained

    def targets(self) -> list[str]:
        """The names of the adapted layers within the transformers model."""
        return list(self.layers)

    def factors(self, adapter: str | None = None) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """(A, B) of an adapter (the own one by default), by the names of their layers."""
        adapter = adapter or self.own
        return {
            name: (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight) for name, layer in self.layers.items()
        }
