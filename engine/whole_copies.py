"""Plain copies of partitioned models, to compute with where no gradient is wanted."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from engine import distributed
from engine.models.backbone import Backbone
from engine.models.loading import empty_like
from engine.zero.accelerator import on_gpu
from engine.zero.engines import FrozenModel, TrainedModel
from engine.zero.gathering import copy_weights, full_shape

Model = TrainedModel | FrozenModel


class WholeCopies:
    """Modules without ZeRO's hooks, which hold the gathered weights of models at stage 3 and compute in their place.

    A module is filled, bucket by bucket and in the compute dtype, when a model asks for it that it does not hold, or
    whose weights have changed since; otherwise nothing is gathered. What is frozen has not changed.

    A model with adapters can be asked for with its updates merged into the matrices, where it computes as its own role
    without the factors' cost. When it is asked for as it is, those matrices are gathered anew, since subtraction would
    not give them back exactly.

    Args:
        between_steps: what becomes of the modules when `release_memory` is called: "keep" them, "free" them, or move
            them to the "host".
        shared: models of one architecture take turns in one module, actor and reference in one, critic and reward
            model in another; else each has its own, and frozen ones are gathered once for good.
    """

    def __init__(self, between_steps: str = "keep", shared: bool = True):
        self.between_steps, self.shared = between_steps, shared
        self._keys: dict[int, object] = {}
        self._modules: dict[object, Backbone] = {}
        self._held: dict[object, _Held] = {}
        self._away = False

    def of(self, model: Model, merged: bool = False) -> Backbone | None:
        """A module that computes what the model's own does, in eval mode where it is a copy (all ranks call this).

        At stages 0 to 2 that is the model's own. It is the caller's until the next call. None where a rank turned out
        not to have the memory for it, which a warning tells: the model is then to compute through its partitions.

        merged: a copy may hold the adapters' updates in its matrices; it then computes as the model's own role alone.
        """
        if model.stage < 3:
            return model.module
        if id(model) not in self._keys:
            self._keys[id(model)] = architecture(model.module) if self.shared else id(model)
        key = self._keys[id(model)]
        wanted = _Held(id(model), model.version, merged and model.module.adapters is not None)
        if key not in self._modules:
            made = unless_out_of_memory(lambda: empty_like(model.module, distributed.device()), model)
            if made is None:
                return None
            self._modules[key] = made
        module = self._modules[key]
        if self._away:
            self._move(distributed.device())
        held = self._held.get(key)
        if held != wanted:
            _fill(module, model.module, held, wanted)
            self._held[key] = wanted
        return module

    def release_memory(self) -> None:
        """Nothing is computed with the modules for a while."""
        if self.between_steps == "free":
            self._modules.clear()
            self._held.clear()
        elif self.between_steps == "host":
            self._move(torch.device("cpu"))
        if self.between_steps != "keep" and on_gpu():
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        for module in self._modules.values():
            module.to(device)
        self._away = device != distributed.device()


Made = TypeVar("Made")


def unless_out_of_memory(make: Callable[[], Made], model: Model) -> Made | None:
    """The copy of the model that `make` makes; None on all ranks, with a warning, if one has not the memory for it."""
    made, message = None, ""
    try:
        made = make()
    except torch.OutOfMemoryError as error:
        message = str(error).split(". ")[0]
    if not distributed.any_rank(made is None):
        return made
    del made
    messages = [text for text in distributed.all_gather_objects(message) if text]
    if on_gpu():
        torch.cuda.empty_cache()
    if distributed.is_main():
        warnings.warn(
            f"a copy of the {model.role} does not fit ({messages[0]}): it computes through its partitions from now on",
            stacklevel=2,
        )
    return None


@dataclass(frozen=True, slots=True)
class _Held:
    """What a module holds: which model, at which version of its weights, and whether with its updates merged."""

    model: int
    version: int
    merged: bool


def _fill(module: Backbone, source: Backbone, held: _Held | None, wanted: _Held) -> None:
    """Have the module hold what is wanted, gathering only what it does not hold."""
    unmerged = [f"model.{name}" for name in module.adapters.unmerge()] if module.adapters is not None else []
    if held is None or held.model != wanted.model:
        copy_weights(source, module)
        module.take_settings_of(source)
    else:
        changed = [name for name, parameter in source.named_parameters() if parameter.requires_grad]
        names = unmerged + (changed if held.version != wanted.version else [])
        if names:
            copy_weights(source, module, frozenset(names))
    if wanted.merged:
        assert module.adapters is not None
        module.adapters.merge()


# What of a configuration changes nothing that a shared module computes: `take_settings_of` sees to the offset.
_NO_MATTER = ("_name_or_path", "score_offset", "score_position", "pad_token_id")


def architecture(module: Backbone) -> object:
    """Equal for modules that can hold each other's weights and then compute the same."""
    shapes = tuple((name, tuple(full_shape(p))) for name, p in module.named_parameters())
    config = {name: value for name, value in module.model.config.to_diff_dict().items() if name not in _NO_MATTER}
    return type(module), type(module.model), getattr(module, "direct_head", None), shapes, str(config)
