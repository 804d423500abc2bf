"""Copies of partitioned models that groups of ranks hold together, where a whole copy does not fit on one."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine import distributed
from engine.distributed import RankGroup
from engine.models.policy import Backbone, Policy, Scorer
from engine.models.saving import merged_weights
from engine.models.tensor_parallel import TensorParallelPlan, bare_model
from engine.plain_copies import (
    Model,
    PlainCopies,
    Result,
    stopped_if_out_of_memory,
    unless_out_of_memory,
    warn_of,
)
from engine.trace import traced
from engine.whole_copies import architecture
from engine.zero.gathering import try_bucket


class TensorParallelCopies(PlainCopies):
    """Modules without ZeRO's hooks in place of models at stage 3, each divided among the ranks of a group.

    As WholeCopies, whose place they take, and always shared by models of one architecture. A rank holds its part of
    each matrix, filled bucket by bucket from the partitions; no rank ever holds more of the whole than a bucket.

    What `of` returns makes experience of each rank's own rows: those of the group are computed together, and each rank
    gets its own back. Its `.model` is the plain thing: it is to be called with the same rows on all ranks of the group.
    Adapters are always merged, so that it computes as the model's own role alone.

    Where a rank has no memory to make or fill its part, all ranks do without. While the ranks of a group compute, one
    that runs out of it cannot be waited for, and the run ends with a message.

    Args:
        ranks: in a group. between_steps: as in PlainCopies.
        cache: bytes of keys and values on each rank, without room for which no copy to generate with is made.
    """

    def __init__(self, ranks: int, between_steps: str = "keep", cache: int = 0):
        super().__init__(between_steps)
        self.group, self.cache = RankGroup(ranks), cache
        self._keys: dict[int, object] = {}
        self._parts: dict[object, _Part] = {}

    def of(self, model: Model, merged: bool = False) -> Backbone | None:
        """As in PlainCopies."""
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
        """As in PlainCopies: no rank holds all of a model."""

    def attempt(self, model: Model, doing: str, compute: Callable[[], Result]) -> Result | None:
        """As in PlainCopies. The ranks of a group exchange what they compute."""
        if model.stage < 3:
            return compute()
        with stopped_if_out_of_memory(model, doing):
            return compute()

    def group_of(self, model: Model) -> RankGroup | None:
        """As in PlainCopies."""
        return self.group

    def free(self) -> None:
        """Let go of all modules."""
        self._parts.clear()
        self._away = False

    def _all(self) -> list[nn.Module]:
        return [part.module for part in self._parts.values()]

    def _with_room(self, key: object, model: Model, generates: bool) -> "_Part":
        """The part of a model, which stands where it computes, with room to be filled and to generate."""
        if key not in self._parts:
            self._parts[key] = _Part(model.module, self.group)
            if generates:  # keys and values come later, where the ranks could not fall back together
                torch.empty(self.cache, dtype=torch.uint8, device=distributed.device())
        if self._away:
            self._move(distributed.device())
        if not self._parts[key].holds(model):
            try_bucket(model.module, whole=True)
        return self._parts[key]


def group_sizes(ranks: int, asked: int | None = None) -> tuple[int, ...]:
    """How many ranks may hold a copy together, of those of a machine: all that divide their number, or what is asked
    for if it does."""
    sizes = range(2, ranks + 1) if asked is None else (asked,)
    return tuple(size for size in sizes if size > 1 and ranks % size == 0)


def why_no_group(ranks: int, asked: int | None) -> str:
    """What is to be said where groups were asked for that the ranks of a machine cannot be divided into; else ""."""
    if asked is None or asked == 1 or group_sizes(ranks, asked):
        return ""
    return f"; no {asked} ranks hold a copy together, since that does not divide the {ranks} of a machine"


def divided_bytes(module: Backbone, sizes: Sequence[int], generates: bool = True) -> tuple[dict[int, int], str | None]:
    """Bytes on each rank of a tensor-parallel copy of a module, by how many ranks hold it, and why there is none.

    generates: whether it is to draw responses with its adapter merged, and not to make experience alone.
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
    """This rank's part of models of one architecture, of which it holds one at a time.

    Raises: ValueError where the model cannot be divided among the ranks of the group, and why.
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
        self._held: tuple[int, int] | None = None  # the model and the version of its weights

    def holds(self, model: Model) -> bool:
        """Whether it has this model's weights as they are now."""
        return self._held == (id(model), model.version)

    @traced("gather of weights")
    @torch.no_grad()
    def hold(self, model: Model) -> None:
        """Hold this model's weights as they are now."""
        if self.holds(model):
            return
        for name, weight in merged_weights(model.module):
            self.plan.fill(self.module.model, name, weight, self.group)
            del weight  # before the next bucket is gathered
        buffers = dict(self.module.model.named_buffers())
        for name, buffer in model.module.model.named_buffers():
            buffers[name].copy_(buffer)
        self.module.take_settings_of(model.module)
        self._held = id(model), model.version


class _Rows:
    """Has a module compute the rows of all ranks of a group at once, and return each rank its own.

    Rows come with a width of their own on each rank, and are padded on the right to one.
    """

    def __init__(self, module: nn.Module, group: RankGroup):
        self.group = group
        self.own: tuple[slice, slice] = slice(None), slice(None)
        module.register_forward_pre_hook(self.gathered, with_kwargs=True)
        module.register_forward_hook(self.own_rows)

    def gathered(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments, with the rows of the group for this rank's: sequences, attention_mask, position_ids (B, S)."""
        columns, others = args[:3], dict(kwargs)
        length = others.get("response_length", 0)
        ranks = self.group.all_objects(([column.cpu() for column in columns], length))
        width = max(each[0].shape[1] for each, _ in ranks)
        behind = width - columns[0].shape[1]
        first = sum(len(each[0]) for each, _ in ranks[: self.group.place])
        rows, until = slice(first, first + len(columns[0])), columns[0].shape[1]
        self.own = rows, slice(0, until)
        if "response_length" in others:
            # The last of the padded columns in which all ranks' responses stand.
            others["response_length"] = most = max(length + width - each[0].shape[1] for each, length in ranks)
            self.own = rows, slice(most - behind - length, most - behind)
        joined = [
            torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]).to(columns[0].device)
            for parts in zip(*(each for each, _ in ranks), strict=True)
        ]
        return (*joined, *args[3:]), others

    def own_rows(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """This rank's part of what was computed, (B, T) or (B, S) each."""
        if isinstance(output, Tensor):
            return output[self.own]
        return tuple(column[self.own] for column in output)
