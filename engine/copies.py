"""Copies of partitioned models, for passes without gradients. A copy is a module without ZeRO's hooks, whose weights
were gathered from a model at stage 3. With `WholeCopies` each rank has a whole copy. With `TensorParallelCopies` a copy
is divided among a group of ranks; this is for models whose whole copy does not fit on one rank.

`PlainCopies` is the base class of both. It keeps, frees or moves copies between steps, and handles the case that memory
runs out.
"""

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from engine import distributed
from engine.distributed import RankGroup
from engine.errors import RunStopped
from engine.models.loading import empty_like
from engine.models.policy import Backbone, Policy, Scorer
from engine.models.saving import merged_weights
from engine.models.tensor_parallel import TensorParallelPlan, bare_model
from engine.trace import traced
from engine.zero.accelerator import on_gpu
from engine.zero.engines import FrozenModel, TrainedModel
from engine.zero.gathering import copy_weights, full_shape, try_bucket

Model = TrainedModel | FrozenModel
Result = TypeVar("Result")
EXPERIENCE = "experience was made with it"


class PlainCopies(ABC):
    """The base class of copies: modules without ZeRO's hooks that compute in place of models at stage 3.

    Args:
        between_steps: what `release_memory` does with the copies: "keep" keeps them, "free" frees them, "host" moves
            them to host memory.
    """

    shared = True

    def __init__(self, between_steps: str = "keep"):
        self.between_steps, self._away = between_steps, False
        self.let_go: Callable[[], None] = lambda: None
        """A function that is called before copies are freed. It must drop all other references to the copies."""
        self._together: Model | None = None  # the model of the running `together` call

    @abstractmethod
    def of(self, model: Model, merged: bool = False) -> Backbone | None:
        """A module that computes the same results as the model's own module (all ranks call this together). At stage 3
        it is a copy in eval mode. At stages 0 to 2 it is the model's own module.

        The caller may use the module until the next call. If a rank has too little memory for a copy, the result is
        None, a warning is printed, and the model has to compute with its partitioned module.

        merged: whether the adapters' updates may be merged into the copy's matrices. A copy with merged updates can
        compute only in the model's own role.
        """

    @abstractmethod
    def attempt(self, model: Model, doing: str, compute: Callable[[], Result]) -> Result | None:
        """The result of `compute`, a function that uses the module that `of` returned. If one rank runs out of memory,
        the result is None on all ranks, and the caller calls `of` again. All ranks call this together.

        doing: a description of `compute` for the warning, such as "responses were drawn with it". Raises: RunStopped if
        a rank that runs out of memory cannot fall back.
        """

    @abstractmethod
    def group_of(self, model: Model) -> RankGroup | None:
        """The group of ranks that hold the model's copy together; None if each rank computes on its own."""

    @abstractmethod
    def holding(self, model: Model) -> Backbone | None:
        """The module that already holds the model's current weights, whole and without merged updates; None if no
        module does. Nothing is gathered for this, and the result is the same on all ranks."""

    @abstractmethod
    def free(self) -> None:
        """Drop all copies, so that their memory is freed."""

    @abstractmethod
    def _all(self) -> list[nn.Module]:
        """The modules."""

    def inferred(self, model: Model, *args, **kwargs) -> Any:
        """The result of a forward pass of the model's copy in inference mode; None if there is too little memory for a
        copy (all ranks call this together)."""
        if self._together is model:
            copy = self.of(model)
            assert copy is not None, "copies are given up where ranks agree, and here they do later"
            return _inferred(copy, *args, **kwargs)
        while (copy := self.of(model)) is not None:
            result = self.attempt(model, EXPERIENCE, partial(_inferred, copy, *args, **kwargs))
            if result is not None:
                return result
            del copy  # frees this copy before another is made
        return None

    def together(self, model: Model, make: Callable[[], Result]) -> Result:
        """The result of several passes of one model (all ranks call this together). The ranks agree only once, after
        all passes, whether memory sufficed. If they agreed after each pass, every rank would wait for the slowest rank
        each time.

        make: a function that makes passes of this model with `inferred`. It must not exchange anything else with other
        ranks. It may be called a second time.
        """
        while self.of(model) is not None:
            made = self.attempt(model, EXPERIENCE, partial(self._made_together, model, make))
            if made is not None:
                return made
        return make()

    def _made_together(self, model: Model, make: Callable[[], Result]) -> Result:
        self._together = model
        try:
            return make()
        finally:
            self._together = None

    def release_memory(self) -> None:
        """To be called when the copies are not needed for a while. They are kept, freed or moved, as `between_steps`
        says."""
        if self.between_steps == "free":
            self.free()
        elif self.between_steps == "host":
            self._move(torch.device("cpu"))
        if self.between_steps != "keep" and on_gpu():
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        for module in self._all():
            module.to(device)
        self._away = device != distributed.device()


def _inferred(copy: nn.Module, *args, **kwargs) -> Any:
    with torch.inference_mode():
        return copy(*args, **kwargs)


def unless_out_of_memory(make: Callable[[], Result]) -> tuple[Result | None, str]:
    """Returns (the result of `make`, "") or, if one rank runs out of memory, (None, text of the error) on all ranks.
    All ranks call this together.

    make: a function that must not exchange anything with other ranks.
    """
    made, message = None, ""
    try:
        made = make()
    except torch.OutOfMemoryError as error:
        message = f"{first_sentence(error)} on rank {distributed.rank()}"
    if not distributed.any_rank(bool(message)):
        return made, ""
    del made
    return None, next(text for text in distributed.all_gather_objects(message) if text)


def together(model: Any, make: Callable[[], Result]) -> Result:
    """The result of `PlainCopies.together` if the model, or the engine that hosts it, has copies; otherwise the result
    of `make`."""
    host = getattr(model, "host", model)
    copies = getattr(host, "copies", None)
    return make() if copies is None else copies.together(host, make)


@contextlib.contextmanager
def stopped_if_out_of_memory(model: Model, doing: str) -> Iterator[None]:
    """A context in which ranks exchange data while they compute with a model's copy. If one rank runs out of memory in
    this context, the other ranks cannot fall back together with it, so the run ends. doing: a description of the
    computation for the message.

    Raises: RunStopped; the message names flags that may help.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunStopped(
            f"a copy of the {model.role} does not fit ({first_sentence(error)} on rank {distributed.rank()}, when "
            f"{doing}), and other ranks wait for this rank. Set --rollout_backend zero3, which makes no copies, "
            "--replicas_between_steps free, or a smaller --per_device_generation_batch_size."
        ) from error


def warn_of(model: Model, doing: str, message: str, then: str) -> None:
    """Warn, on one rank, that a copy does not fit. doing: what was done with the copy. message: the text of the error.
    then: what happens instead."""
    if on_gpu():
        torch.cuda.empty_cache()
    if distributed.is_main():
        warnings.warn(
            f"a copy of the {model.role} does not fit ({message}, when {doing}): {then} from now on", stacklevel=3
        )


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error's message."""
    return (str(error) or type(error).__name__).split(". ")[0]


class WholeCopies(PlainCopies):
    """Copies that hold the whole, gathered weights of models at stage 3, and compute in place of these models without
    ZeRO's hooks.

    If `of` is called and the copy does not hold the model's current weights, the weights are gathered into it bucket by
    bucket, in the compute dtype. Otherwise nothing is gathered. Frozen weights are gathered only once.

    If a model has adapters, their updates can be merged into the copy's matrices. Such a copy computes only in the
    model's own role, and does not compute with the LoRA factors. To unmerge a copy, the matrices are gathered again,
    because subtracting the updates would not restore the matrices exactly.

    If memory runs out on any rank while a copy is created, filled or computing, all ranks free the copies and continue
    with less memory. The first time, models that have separate copies share them from then on. The next time, the model
    gets the copies that `smaller` returns. After that, the model computes with its partitioned module. A whole copy
    computes without communication. Every rank therefore reaches the point at which the ranks agree.

    Args:
        between_steps: as in PlainCopies.
        shared: whether models of the same architecture use one copy in turn: actor and reference share one, critic and
            reward model another. If not, each model has a copy of its own, and frozen weights are gathered only once.
            smaller: a function that gets a model whose shared copy did not fit. It returns copies of another kind, or
            None if the model should compute with its partitioned module. All ranks call it together.
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
        self._instead: dict[int, PlainCopies | None] = {}  # {id of a model that has no whole copy: its other copies}

    def of(self, model: Model, merged: bool = False) -> Backbone | None:
        """See PlainCopies."""
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
        """See PlainCopies."""
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
        """See PlainCopies."""
        instead = self._instead.get(id(model))
        return None if instead is None else instead.group_of(model)

    def release_memory(self) -> None:
        """See PlainCopies."""
        super().release_memory()
        for copies in self._instead.values():
            if copies is not None:
                copies.release_memory()

    def free(self) -> None:
        """Drop all copies, so that their memory is freed."""
        self._modules.clear()
        self._held.clear()
        self._away = False

    def _all(self) -> list[nn.Module]:
        return list(self._modules.values())

    def _copy(self, model: Model, merged: bool) -> Backbone | None:
        """The copy with the model's current weights; None if the copy does not fit."""
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
        module, names = ready
        with stopped_if_out_of_memory(model, "it was filled"):
            if names is None or names:
                copy_weights(model.module, module, names)
            if held is None or held.model != wanted.model:
                module.take_settings_of(model.module)
        if wanted.merged and self.attempt(model, "adapters were merged", partial(_merged, module)) is None:
            return None
        self._held[key] = wanted
        return module

    def holding(self, model: Model) -> Backbone | None:
        """See PlainCopies."""
        key = self._keys.get(id(model))
        held = self._held.get(key) == _Held(id(model), model.version, merged=False)
        return self._modules[key] if held and not self._away else None

    def _do_with_less(self, model: Model, doing: str, message: str) -> None:
        """Free all copies, and choose other copies for the model (all ranks call this together)."""
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
    """Which weights a copy holds. model: the id of the model. version: the version of the model's weights. merged:
    whether the adapters' updates are merged."""

    model: int
    version: int
    merged: bool


def _missing(module: Backbone, source: Backbone, held: _Held | None, wanted: _Held) -> frozenset[str] | None:
    """The names of the weights to copy so that the module holds the weights `wanted`; None for all weights. If any
    weights have to be copied, the module's adapters are unmerged first.
    """
    if held == wanted:
        return frozenset()
    unmerged = [f"model.{name}" for name in module.adapters.unmerge()] if module.adapters is not None else []
    if held is None or held.model != wanted.model:
        return None
    changed = [name for name, parameter in source.named_parameters() if parameter.requires_grad]
    if not changed and held.version != wanted.version:  # a frozen model whose weights were replaced
        return None
    return frozenset(unmerged + (changed if held.version != wanted.version else []))


def _merged(module: Backbone) -> Backbone:
    assert module.adapters is not None
    module.adapters.merge()
    return module


# Settings of a configuration that may differ between models that share a copy. `take_settings_of` sets the offset.
# `dtype` is the dtype of the files on some ranks and that of the weights on others.
_NO_MATTER = ("_name_or_path", "score_offset", "score_position", "pad_token_id", "dtype")


def architecture(module: Backbone) -> object:
    """A value that is equal for two modules if each can hold the other's weights and then computes the other's
    results."""
    shapes = tuple((name, tuple(full_shape(p))) for name, p in module.named_parameters())
    config = {name: value for name, value in module.model.config.to_diff_dict().items() if name not in _NO_MATTER}
    dtype = next(module.parameters()).dtype
    return type(module), type(module.model), getattr(module, "direct_head", None), dtype, shapes, str(config)


class TensorParallelCopies(PlainCopies):
    """Copies that compute in place of models at stage 3 without ZeRO's hooks. Each copy is divided among the ranks of a
    group.

    TensorParallelCopies work like WholeCopies, but models of the same architecture always share one copy. A rank holds
    a part of each matrix. The parts are filled bucket by bucket from ZeRO's partitions, so that no rank ever holds more
    than one bucket of whole weights.

    Each rank passes its own rows to the module that `of` returns. The module computes the rows of the whole group
    together, and returns to each rank the results for its own rows. The Hugging Face model within it, `.model`, has to
    be called with the same rows on all ranks of the group. Adapters are always merged, so a copy computes only in the
    model's own role.

    If a rank has too little memory to create or fill its part, all ranks do without the copy. If a rank runs out of
    memory while its group computes, the run ends with a message, because the other ranks would wait forever.

    Args:
        ranks: the number of ranks in a group. between_steps: as in PlainCopies.
        cache: the number of bytes of keys and values on each rank. A copy that generates is created only if there is
            memory for these bytes too.
    """

    def __init__(self, ranks: int, between_steps: str = "keep", cache: int = 0):
        super().__init__(between_steps)
        self.group, self.cache = RankGroup(ranks), cache
        self._keys: dict[int, object] = {}
        self._parts: dict[object, _Part] = {}

    def of(self, model: Model, merged: bool = False) -> Backbone | None:
        """See PlainCopies."""
        assert merged or model.module.adapters is None, "a tensor-parallel copy has an adapter's updates merged"
        if model.stage < 3:
            return model.module
        if id(model) not in self._keys:
            self._keys[id(model)] = architecture(model.module)
        key, part = self._keys[id(model)], self._parts.get(self._keys[id(model)])
        if self._away or part is None or not part.holds(model):
            part, message = unless_out_of_memory(lambda: self._with_room(key, model, merged))
            if part is None:
                self.let_go()
                self.free()
                warn_of(model, "it was made", message, "it computes through its partitions")
                return None
            with stopped_if_out_of_memory(model, "it was filled"):
                part.hold(model)
        return part.module

    def holding(self, model: Model) -> None:
        """See PlainCopies. The result is always None, since no rank holds a whole model."""

    def attempt(self, model: Model, doing: str, compute: Callable[[], Result]) -> Result | None:
        """See PlainCopies. While `compute` runs, the ranks of a group exchange partial results."""
        if model.stage < 3:
            return compute()
        with stopped_if_out_of_memory(model, doing):
            return compute()

    def group_of(self, model: Model) -> RankGroup | None:
        """See PlainCopies."""
        return self.group

    def free(self) -> None:
        """Drop all copies, so that their memory is freed."""
        self._parts.clear()
        self._away = False

    def _all(self) -> list[nn.Module]:
        return [part.module for part in self._parts.values()]

    def _with_room(self, key: object, model: Model, generates: bool) -> "_Part":
        """This rank's part of a model, on the device. Raises torch's out-of-memory error if there is too little memory
        to fill the part or, if the copy `generates`, for keys and values."""
        if key not in self._parts:
            self._parts[key] = _Part(model.module, self.group)
            if generates:  # tried now, since ranks cannot fall back together when keys and values are allocated later
                torch.empty(self.cache, dtype=torch.uint8, device=distributed.device())
        if self._away:
            self._move(distributed.device())
        if not self._parts[key].holds(model):
            try_bucket(model.module, whole=True)
        return self._parts[key]


def group_sizes(ranks: int, asked: int | None = None) -> tuple[int, ...]:
    """The possible sizes of groups on a machine with this number of ranks: all divisors of `ranks` over 1. If `asked`
    is given, the result has only this size, or none if `asked` does not divide `ranks`."""
    sizes = range(2, ranks + 1) if asked is None else (asked,)
    return tuple(size for size in sizes if size > 1 and ranks % size == 0)


def why_no_group(ranks: int, asked: int | None) -> str:
    """A text for a message if the ranks of a machine cannot be divided into groups of the size `asked`; otherwise
    ""."""
    if asked is None or asked == 1 or group_sizes(ranks, asked):
        return ""
    return f"; no {asked} ranks hold a copy together, since that does not divide the {ranks} of a machine"


def divided_bytes(module: Backbone, sizes: Sequence[int], generates: bool = True) -> tuple[dict[int, int], str | None]:
    """Returns ({number of ranks in a group: bytes on each rank}, None) for tensor-parallel copies of a module, or ({},
    the reason) if the module cannot have such copies.

    generates: whether the copy draws responses, with its adapter merged; False if it only computes experience.
    """
    if not sizes:
        return {}, None
    if type(module) not in (Policy, Scorer):
        return {}, f"a {type(module).__name__} is several models in one"
    if module.adapters is not None and not generates:
        return {}, "it computes with its adapter and without it"
    bare, width = bare_model(module), next(module.parameters()).element_size()
    plans = [TensorParallelPlan.of(bare, size) for size in sizes]
    found = {plan.ranks: width * plan.numbers(bare) for plan in plans if plan.obstacle is None}
    return found, None if found else next((plan.obstacle for plan in plans), None)


class _Part:
    """This rank's part of a divided copy. It holds the weights of one model at a time; all its models have the same
    architecture.

    Raises: ValueError, with the reason, if the model cannot be divided among the ranks of the group.
    """

    def __init__(self, like: Backbone, group: RankGroup):
        bare = bare_model(like)
        self.plan, self.group = TensorParallelPlan.of(bare, group.size), group
        if self.plan.obstacle is not None:
            raise ValueError(self.plan.obstacle)
        divided = self.plan.part(bare, group, distributed.device())
        self.module: Any = cast(Any, type(like)(divided, like.replaced))
        if isinstance(like, Policy):
            self.module.direct_head = like.direct_head
        _Rows(self.module, group)
        self._held: tuple[int, int] | None = None  # (id of the model, version of the model's weights)

    def holds(self, model: Model) -> bool:
        """Whether the part holds this model's current weights."""
        return self._held == (id(model), model.version)

    @traced("gather of weights")
    @torch.no_grad()
    def hold(self, model: Model) -> None:
        """Fill the part with this model's current weights (all ranks call this together)."""
        if self.holds(model):
            return
        for name, weight in merged_weights(model.module):
            self.plan.fill(self.module.model, name, weight, self.group)
            del weight  # frees it before the next bucket is gathered
        buffers = dict(self.module.model.named_buffers())
        for name, buffer in model.module.model.named_buffers():
            buffers[name].copy_(buffer)
        self.module.take_settings_of(model.module)
        self._held = id(model), model.version


class _Rows:
    """Hooks of a module. With these hooks the module computes the rows of all ranks of a group together, and returns to
    each rank the results for its own rows.

    Ranks may call the module with rows of different widths; all rows are padded on the right to the same width.
    """

    def __init__(self, module: nn.Module, group: RankGroup):
        self.group = group
        self.own: tuple[slice, slice] = slice(None), slice(None)
        module.register_forward_pre_hook(self.gathered, with_kwargs=True)
        module.register_forward_hook(self.own_rows)

    def gathered(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns sequences, attention_mask and position_ids with the rows of the whole group; the arguments, (B, S),
        have only this rank's rows."""
        columns, others = args[:3], dict(kwargs)
        length = others.get("response_length", 0)
        ranks = self.group.all_objects(([column.cpu() for column in columns], length))
        width = max(each[0].shape[1] for each, _ in ranks)
        behind = width - columns[0].shape[1]
        first = sum(len(each[0]) for each, _ in ranks[: self.group.place])
        rows, until = slice(first, first + len(columns[0])), columns[0].shape[1]
        self.own = rows, slice(0, until)
        if "response_length" in others:
            # The number of last columns that, after padding, contain the responses of all ranks.
            others["response_length"] = most = max(length + width - each[0].shape[1] for each, length in ranks)
            self.own = rows, slice(most - behind - length, most - behind)
        joined = [
            torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]).to(columns[0].device)
            for parts in zip(*(each for each, _ in ranks), strict=True)
        ]
        return (*joined, *args[3:]), others

    def own_rows(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """This rank's rows of the output, a tensor or tensors (B, T) or (B, S)."""
        if isinstance(output, Tensor):
            return output[self.own]
        return tuple(column[self.own] for column in output)
