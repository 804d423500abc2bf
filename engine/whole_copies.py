"""Plain copies of partitioned models, to compute with where no gradient is wanted."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from engine import distributed
from engine.distributed import RankGroup
from engine.models.loading import empty_like
from engine.models.policy import Backbone
from engine.plain_copies import (
    Model,
    PlainCopies,
    Result,
    stopped_if_out_of_memory,
    unless_out_of_memory,
    warn_of,
)
from engine.zero.gathering import copy_weights, full_shape, try_bucket


class WholeCopies(PlainCopies):
    """Modules without ZeRO's hooks, which hold the gathered weights of models at stage 3 and compute in their place.

    A module is filled, bucket by bucket and in the compute dtype, when a model asks for it that it does not hold, or
    whose weights have changed since; otherwise nothing is gathered. What is frozen has not changed.

    A model with adapters can be asked for with its updates merged into the matrices, where it computes as its own role
    without the factors' cost. When it is asked for as it is, those matrices are gathered anew, since subtraction would
    not give them back exactly.

    Where memory runs out on any rank, while a module is made, filled or computed with, all ranks let go of the modules
    and do with less: models with copies of their own share them, then what `smaller` gives takes the model's place,
    then its partitions. A module computes without its fellows on other ranks, so that all of them come to where they
    agree.

    Args:
        between_steps: as in PlainCopies.
        shared: models of one architecture take turns in one module, actor and reference in one, critic and reward
            model in another; else each has its own, and frozen ones are gathered once for good.
        smaller: of a model for which a shared copy has turned out not to fit, copies of another kind, or None for its
            partitions. All ranks call it together.
    """

    def __init__(
        self,
        between_steps: str = "keep",
        shared: bool = True,
        smaller: Callable[[Model], PlainCopies | None] = lambda model: None,
    ):
        super().__init__(between_steps)
        self.shared, self.smaller = shared, smaller
        self._keys: dict[int, object] = {}
        self._modules: dict[object, Backbone] = {}
        self._held: dict[object, _Held] = {}
        self._instead: dict[int, PlainCopies | None] = {}  # by models that have no whole copy any more

    def of(self, model: Model, merged: bool = False) -> Backbone | None:
        """As in PlainCopies."""
        if model.stage < 3:
            return model.module
        while id(model) not in self._instead:
            if (module := self._copy(model, merged)) is not None:
                return module
        instead = self._instead[id(model)]
        if instead is None or (model.module.adapters is not None and not merged):
            return None
        return instead.of(model, merged)

    def attempt(self, model: Model, doing: str, compute: Callable[[], Result]) -> Result | None:
        """As in PlainCopies."""
        if model.stage < 3:
            return compute()
        instead = self._instead.get(id(model))
        if instead is not None:
            return instead.attempt(model, doing, compute)
        made, message = unless_out_of_memory(compute)
        if message:
            self._do_with_less(model, doing, message)
        return made

    def group_of(self, model: Model) -> RankGroup | None:
        """As in PlainCopies."""
        instead = self._instead.get(id(model))
        return None if instead is None else instead.group_of(model)

    def release_memory(self) -> None:
        """Nothing is computed with the modules for a while."""
        super().release_memory()
        for copies in self._instead.values():
            if copies is not None:
                copies.release_memory()

    def free(self) -> None:
        """Let go of all modules."""
        self._modules.clear()
        self._held.clear()
        self._away = False

    def _all(self) -> list[nn.Module]:
        return list(self._modules.values())

    def _copy(self, model: Model, merged: bool) -> Backbone | None:
        """A module that holds the model's weights as they are now; None where it does not fit."""
        if id(model) not in self._keys:
            self._keys[id(model)] = architecture(model.module) if self.shared else id(model)
        key = self._keys[id(model)]
        wanted = _Held(id(model), model.version, merged and model.module.adapters is not None)
        held = self._held.get(key)
        if held == wanted and not self._away:
            return self._modules[key]

        def with_room() -> tuple[Backbone, frozenset[str] | None]:
            if key not in self._modules:
                self._modules[key] = empty_like(model.module, distributed.device())
            if self._away:
                self._move(distributed.device())
            names = _missing(self._modules[key], model.module, held, wanted)
            try_bucket(model.module, names)
            return self._modules[key], names

        ready = self.attempt(model, "it was made", with_room)
        if ready is None or held == wanted:
            return None if ready is None else ready[0]
        self._held.pop(key, None)
        with stopped_if_out_of_memory(model, "it was filled"):
            _fill(*ready, model.module, anew=held is None or held.model != wanted.model)
        module = self.attempt(model, "adapters were merged", lambda: _merged(ready[0])) if wanted.merged else ready[0]
        if module is not None:
            self._held[key] = wanted
        return module

    def holding(self, model: Model) -> Backbone | None:
        """As in PlainCopies."""
        key = self._keys.get(id(model))
        held = self._held.get(key) == _Held(id(model), model.version, merged=False)
        return self._modules[key] if held and not self._away else None

    def _do_with_less(self, model: Model, doing: str, message: str) -> None:
        """Free all modules, and settle what the model computes with from now on (all ranks call this)."""
        self.let_go()
        self.free()
        if not self.shared:
            self.shared, then = True, "models of one shape take turns in one"
            self._keys.clear()
        else:
            instead = self._instead[id(model)] = self.smaller(model)
            group = instead and instead.group_of(model)
            then = f"{group.size} ranks hold one together" if group else "it computes through its partitions"
        warn_of(model, doing, message, then)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a module holds: which model, at which version of its weights, and whether with its updates merged."""

    model: int
    version: int
    merged: bool


def _missing(module: Backbone, source: Backbone, held: _Held | None, wanted: _Held) -> frozenset[str] | None:
    """Names of the weights that the module does not hold as they are wanted; None for all.

    Where there are any, its adapters are not merged any more.
    """
    if held == wanted:
        return frozenset()
    unmerged = [f"model.{name}" for name in module.adapters.unmerge()] if module.adapters is not None else []
    if held is None or held.model != wanted.model:
        return None
    changed = [name for name, parameter in source.named_parameters() if parameter.requires_grad]
    if not changed and held.version != wanted.version:  # a frozen model that has taken other weights
        return None
    return frozenset(unmerged + (changed if held.version != wanted.version else []))


def _fill(module: Backbone, names: frozenset[str] | None, source: Backbone, anew: bool) -> None:
    """Gather weights of these names, None for all, into the module. anew: it held another model, or none."""
    if names is None or names:
        copy_weights(source, module, names)
    if anew:
        module.take_settings_of(source)


def _merged(module: Backbone) -> Backbone:
    assert module.adapters is not None
    module.adapters.merge()
    return module


# What of a configuration changes nothing that a shared module computes: `take_settings_of` sees to the offset; the
# dtype is the file's on some ranks, the weights' own on others.
_NO_MATTER = ("_name_or_path", "score_offset", "score_position", "pad_token_id", "dtype")


def architecture(module: Backbone) -> object:
    """Equal for modules that can hold each other's weights and then compute the same."""
    shapes = tuple((name, tuple(full_shape(p))) for name, p in module.named_parameters())
    config = {name: value for name, value in module.model.config.to_diff_dict().items() if name not in _NO_MATTER}
    dtype = next(module.parameters()).dtype
    return type(module), type(module.model), getattr(module, "direct_head", None), dtype, shapes, str(config)
