"""What Policy and Scorer have in common: a Hugging Face model, and how its trunk is called."""

import inspect
from typing import Any, Self

from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.models.adapter_folders import AdapterFolder
from engine.models.adapters import Adapters
from engine.models.packed_rows import PackedRows


class Backbone(nn.Module):
    """A Hugging Face model, called with the arguments that its family's trunk takes.

    replaced: settings of the model's own configuration, by name, for which loading has put others (`as_computed`); they
    are put back into what is saved.
    adapters: the LoRA adapters within the model, if it has some.
    base: the path that its weights were loaded from. base_contents: the fingerprint by which an adapter's folder is to
    know these; None without adapters. start: the adapter that training is to go on with, of a model that
    was loaded without it; None otherwise. merged: the adapter that loading has merged into the weights.
    packs: whether padding is taken out of rows before they go through the layers.
    """

    model: PreTrainedModel
    adapters: Adapters | None = None
    base: str | None = None
    base_contents: str | None = None
    start: AdapterFolder | None = None
    merged: AdapterFolder | None = None
    packs = False

    def __init__(self, model: PreTrainedModel, replaced: dict[str, Any] | None = None):
        super().__init__()
        self.model = model
        self.replaced = replaced or {}
        # Some families, BLOOM for one, take no positions: they count along the attention mask.
        self._takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters

    def with_model(self, model: PreTrainedModel) -> Self:
        """A module of this kind and with these settings and adapters, for another model of the same architecture."""
        other = type(self)(model, self.replaced)
        other.pack(self.packs)
        if self.adapters is not None:
            other.adapters = self.adapters.within(model)
        return other

    def take_settings_of(self, other) -> None:
        """Take over what another module of this architecture computes with besides its weights.

        A module that holds the weights of different models in turn is given these settings with each.
        """

    def pack(self, packs: bool) -> None:
        """Have rows go through the layers without their padding from now on, or with it."""
        self.packs = packs

    def checkpoint_activations(self) -> None:
        """Keep each layer's input alone in forward passes, and compute the rest again in the backward pass."""
        model = self.model
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # the first is its name from transformers 5.23 on, where the other one warns

    def as_role(self, role: str) -> "Backbone":
        """The Policy or Scorer that this is in a role: itself, unless it is several."""
        return self

    def take_role(self, role: str | None) -> None:
        """Compute as one of the models that this one is from now on: None for what trains, and always for those that
        are one model only."""
        if self.adapters is not None:
            self.adapters.take(role)
        else:
            assert role is None, f"a model without adapters was asked to be the {role}"

    def inputs(self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor) -> dict:
        """The keyword arguments of a forward pass without cache; all arguments (B, S) int64."""
        named = {"input_ids": sequences, "attention_mask": attention_mask, "use_cache": False}
        if self._takes_positions:
            named["position_ids"] = position_ids
        return named

    def packed_inputs(self, rows: PackedRows, sequences: Tensor, position_ids: Tensor) -> dict:
        """The same of rows without their padding; no mask, which would be taken for one of a padded batch."""
        named = {"input_ids": rows.packed(sequences), "position_ids": rows.packed(position_ids), "use_cache": False}
        return named | rows.arguments(self.model.base_model.config._attn_implementation)

    def packed_states(self, rows: PackedRows, sequences: Tensor, position_ids: Tensor) -> Tensor:
        """The trunk's last hidden states of all real tokens, (1, N, d)."""
        return self.model.base_model(**self.packed_inputs(rows, sequences, position_ids))[0]

    def hidden_states(self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """The trunk's last hidden states, (B, S, d)."""
        return self.model.base_model(**self.inputs(sequences, attention_mask, position_ids))[0]
