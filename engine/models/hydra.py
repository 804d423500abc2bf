"""Hydra: an actor of which only the last layers train. Frozen copies of these layers, in the same engine, serve as the
reference.

    policy = load_hydra("sft", torch.float32, layers=2)
    logprobs, _ = policy(sequences, attention_mask, position_ids, response_length=8)
    ref_logprobs, _ = policy(sequences, attention_mask, position_ids, response_length=8, role="reference")

These parts train: the last layers, the final norm after them, and the head if it is not tied to the embedding.
Everything before these layers is frozen. The frozen copies get their inputs from the frozen layers, so together they
compute what the model computed before training. This needs memory for a few layers instead of a second model.

Source: CarperAI/trlx 3340c2f3, `freeze_bottom_causal_layers` and `ModelBranch`, which copies a tied head too (the copy
stays equal, because the head is frozen). Before the layers, trlX freezes only the token embedding. In trlX, position
embeddings and the norm of an embedding keep learning, so trlX's reference changes with them. Here both are frozen.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import UserError
from engine.models.attention import USUAL, Attention
from engine.models.checking import check_policy
from engine.models.config_and_tokenizer import LANGUAGE_MODEL, model_class
from engine.models.loading import load_policy
from engine.models.lora import ask_for_gradient, decoder_stack
from engine.models.policy import Policy
from engine.zero.gathering import full_shape, is_partitioned, whole_copy


class HydraPolicy(Policy):
    """A Policy that can also compute the log-probs of the model before training.

    `branch` holds the frozen copies. `branch` is not part of `model`, so the actor is saved without the copies. Under
    ZeRO the copies belong to the actor's engine, which partitions and gathers them like the other weights.
    """

    def __init__(self, model: nn.Module, replaced: dict[str, Any] | None = None, *, layers: int):
        super().__init__(model, replaced)
        self.layers, self.names = layers, trained_parts(model, layers)
        self.branch = nn.ModuleList(whole_copy(model.get_submodule(name), model.config) for name in self.names)
        self.requires_grad_(False)
        for name in self.names:
            model.get_submodule(name).requires_grad_(True)
        first = model.get_submodule(self.names[0])
        if any(is_partitioned(parameter) for parameter in first.parameters()):
            first.register_forward_pre_hook(ask_for_gradient)

    def forward(self, *args, role: str | None = None, **kwargs):
        """As in Policy. With the role "reference" the results are those of the model before training."""
        with self._copies_in_place() if role == "reference" else contextlib.nullcontext():
            return super().forward(*args, **kwargs)

    @contextlib.contextmanager
    def _copies_in_place(self) -> Iterator[None]:
        """Within this context the frozen copies replace the trained parts of the model."""
        trained = [self.model.get_submodule(name) for name in self.names]
        try:
            self._put(self.branch)
            yield
        finally:
            self._put(trained)

    def _put(self, parts: list[nn.Module] | nn.ModuleList) -> None:
        for name, part in zip(self.names, parts, strict=True):
            parent, _, child = name.rpartition(".")
            setattr(self.model.get_submodule(parent), child, part)


def load_hydra(
    path: str,
    dtype: torch.dtype,
    ds_config: dict | None = None,
    what: str = "model",
    *,
    layers: int,
    trust_remote_code: bool = False,
    attention: Attention = USUAL,
) -> HydraPolicy:
    """A HydraPolicy with the model that `load_policy` loads. The last `layers` layers train.

    Raises: UserError as `check_policy` and `trained_parts` do.
    """
    policy = load_policy(path, dtype, ds_config, what, trust_remote_code=trust_remote_code, attention=attention)
    hydra = HydraPolicy(policy.model, policy.replaced, layers=layers)
    hydra.pack(policy.packs)
    hydra.base, hydra.merged = policy.base, policy.merged
    return hydra


def check_hydra(path: str, layers: int, what: str, trust_remote_code: bool = False) -> None:
    """Raise UserError, with the flag `what` in its message, unless the model at `path` has a stack of at least `layers`
    layers.

    Only the configuration is read.
    """
    config = check_policy(path, what, trust_remote_code)
    with torch.device("meta"):
        model = model_class(config, LANGUAGE_MODEL, path, what, trust_remote_code)._from_config(config)
    try:
        trained_parts(model, layers)
    except UserError as error:
        raise UserError(f"{what} {path}: {error}") from None


def trained_parts(model: PreTrainedModel, layers: int) -> list[str]:
    """The names of the modules that train: the last `layers` decoder layers, the final norm, and the head if it is not
    tied to the embedding.

    The final norm is found by a rule: it is the last module outside the stack whose parameters are vectors only, and
    whose class occurs in the layers too. If the rule finds another module or none, the reference is still right,
    because exactly the trained parts are copied.

    Raises: UserError if the model has no stack of decoder layers, or a stack of fewer than `layers` layers.
    """
    stack = decoder_stack(model)
    kind = type(model).__name__
    if stack is None:
        raise UserError(
            f"hydra_layers {layers}: {kind} has no stack of decoder layers whose last ones could train "
            "alone. Set hydra_layers to 0."
        )
    layer_list, modules = model.get_submodule(stack), dict(model.named_modules())
    assert isinstance(layer_list, nn.ModuleList), stack
    if layers > len(layer_list):
        raise UserError(f"hydra_layers {layers}: the actor has {len(layer_list)} layers. Give at most that many.")
    names = [f"{stack}.{index}" for index in range(len(layer_list) - layers, len(layer_list))]
    parent, within = stack.rpartition(".")[0], {type(part) for part in layer_list.modules()}
    names += [
        f"{parent}.{name}"
        for name, child in model.get_submodule(parent).named_children()
        if type(child) in within and _has_vectors_only(child)
    ][-1:]
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        names += [name for name, module in modules.items() if module is head]
    return names


def _has_vectors_only(module: nn.Module) -> bool:
    dimensions = [len(full_shape(parameter)) for parameter in module.parameters()]
    return bool(dimensions) and max(dimensions) == 1
