"""Several forward and backward passes for one optimizer step at stage 3. If there is enough memory, weights are
gathered once for all passes, and gradients are reduced once."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine import distributed
from engine.trace import traced
from engine.zero import accelerator
from engine.zero.gathering import is_available, is_partitioned, set_gathered, whole_weights

USED, KEPT = 0.8, 0.4
"""Fractions of the free memory. USED: the fraction for passes, kept weights and kept gradients together, if the memory
that passes take is known. KEPT: the fraction for kept weights and gradients, if the memory that passes take is not
known."""
_LONG_BATCH = -1
"""The id under which TrainingGather is listed among the modules that use a parameter. DeepSpeed's ids of modules start
at 0."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Whether each rank keeps whole weights and whole gradients in memory between the passes of an optimizer step.
    Gradients are kept only if weights are kept."""

    weights: bool = False
    gradients: bool = False


NOTHING_KEPT = Kept()


def what_to_keep(weights: int, gradients: int, passes: int | None, free: int) -> Kept:
    """Whether whole weights and whole gradients fit in memory. Weights have priority over gradients, because a pass
    gathers weights twice and reduces gradients once.

    Args:
        weights, gradients: the number of bytes of all weights and of all gradients. passes: the number of bytes that a
            forward and backward pass takes; None if it is not known. free: the number of bytes that are free on each
            rank before the passes.
    """
    room = KEPT * free if passes is None else USED * free - passes
    return Kept(weights <= room, weights + gradients <= room)


def partitioned(module: nn.Module) -> dict[str, Any]:
    """{name: parameter} of the parameters that ZeRO-3 manages."""
    return {name: one for name, one in module.named_parameters() if is_partitioned(one)}


@contextlib.contextmanager
def kept_gathered(named: dict[str, Any], whole: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context parameters stay gathered once a forward pass has gathered them. whole: full weights that
    stand in for them. DeepSpeed frees a parameter only when no module uses it."""
    for name, parameter in named.items():
        if name in whole and not is_available(parameter):
            set_gathered(parameter, whole[name])
        parameter.ds_active_sub_modules.add(_LONG_BATCH)
    try:
        yield
    finally:
        for parameter in named.values():
            parameter.ds_active_sub_modules.discard(_LONG_BATCH)
            if is_available(parameter) and not parameter.ds_persist:
                parameter.partition()


class InferenceGather:
    """Keeps the weights of a module at stage 3 gathered for several forward passes without gradients."""

    def __init__(self, module: nn.Module):
        self.module, self._named = module, partitioned(module)

    @contextlib.contextmanager
    def gathered(self, copy: nn.Module | None = None) -> Iterator[None]:
        """A context for forward passes (all ranks enter it together). copy: as in `TrainingGather.gathered`."""
        if not self._named or (copy is None and not self._fits()):
            yield
            return
        with kept_gathered(
            self._named, dict(copy.named_parameters(remove_duplicate=False)) if copy else self._gathered()
        ):
            yield

    @traced("gather of weights")
    def _gathered(self) -> dict[str, Tensor]:
        """The whole weights, as parts of one tensor for each dtype. The memory of one large tensor can be used again
        for that of the next model, while many small ones would leave gaps."""
        sizes: Counter[torch.dtype] = Counter()
        for one in self._named.values():
            sizes[one.dtype] += one.ds_numel
        flat = {dtype: torch.empty(size, dtype=dtype, device=distributed.device()) for dtype, size in sizes.items()}
        whole = {}
        for name, weight in whole_weights(self.module, self._named):
            rest = flat[weight.dtype]
            whole[name] = rest[: weight.numel()].view_as(weight).copy_(weight)
            flat[weight.dtype] = rest[weight.numel() :]
        return whole

    def _fits(self) -> bool:
        """Whether the whole weights fit into the memory that is free now. Before the first optimizer step more is free
        than later, when there are gradients and Adam's moments."""
        free = -distributed.largest(-accelerator.free_memory())
        return sum(one.ds_numel * one.element_size() for one in self._named.values()) <= KEPT * free


class TrainingGather:
    """Keeps the weights of a module at stage 3 gathered from the first forward pass to the last backward pass, and adds
    up gradients on each rank, so that they are reduced in the last pass only.

    If a whole copy holds the same weights, as it does from a rollout to the first optimizer step, the passes use the
    copy's weights, even if there is only one pass. In this case nothing is gathered, and no further memory is needed.

    How it works: DeepSpeed frees a parameter only when no module uses it, and does not reduce a gradient that is marked
    as not ready.

    Args:
        empty_gradients: a function that sets the partitions of gradients to 0; the last pass adds to the partitions.
        sums: the dtype in which the gradients of several passes have to be added up. A rank can add up gradients only
            in the weights' dtype. If `sums` is another dtype, gradients are reduced in each pass, and DeepSpeed adds up
            the reduced gradients.
    """

    def __init__(self, module: nn.Module, role: str, empty_gradients: Callable[[], None], sums: torch.dtype):
        self.role = role
        self.empty_gradients = empty_gradients
        self.sums = sums
        self.kept: Kept | None = None  # None until `_decided` is called
        self._named = partitioned(module)
        self._parameters = list(self._named.values())
        self._left = 0  # the number of remaining backward passes; the last one reduces gradients
        self._passes: int | None = None  # the measured number of bytes of a pass; None if not measured

    @contextlib.contextmanager
    def gathered(self, passes: int, first: bool, copy: nn.Module | None = None) -> Iterator[None]:
        """A context for `passes` forward passes, each followed by its backward pass (all ranks enter it together).

        first: whether these are the first passes of an optimizer step. copy: an unpartitioned module with the same
        weights, which do not change within this context; or None.
        """
        if not self._parameters:
            yield
            return
        with contextlib.ExitStack() as kept:
            if copy is not None:
                kept.enter_context(kept_gathered(self._named, dict(copy.named_parameters(remove_duplicate=False))))
            if passes > 1 and self.kept is None and accelerator.on_gpu() and self._passes is None:
                kept.enter_context(self._measured())
            elif passes > 1:
                self.kept = self.kept or self._decided()
                if self.kept.weights and copy is None:
                    kept.enter_context(kept_gathered(self._named, {}))
                if self.kept.gradients:
                    kept.enter_context(self._summed(passes, first))
            yield

    def before_backward(self) -> None:
        """To be called before each backward pass. Before the last backward pass, it marks gradients as ready to be
        reduced."""
        if self._left:
            self._left -= 1
            self._say_ready(not self._left)

    @contextlib.contextmanager
    def _summed(self, passes: int, first: bool) -> Iterator[None]:
        if first:
            self.empty_gradients()
        self._left = passes
        try:
            yield
        finally:
            self._left = 0
            self._say_ready(True)

    def _say_ready(self, ready: bool) -> None:
        for parameter in self._parameters:
            parameter.ds_grad_is_ready = ready

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """Measure the number of bytes that passes take on a GPU. The measurement uses torch's memory peak. If an
        earlier peak was higher, the result is too large; it is never too small."""
        before = torch.cuda.memory_allocated()
        yield
        self._passes = distributed.largest(torch.cuda.max_memory_allocated() - before)

    def _decided(self) -> Kept:
        free = -distributed.largest(-accelerator.free_memory())
        sizes = [(parameter.ds_numel * parameter.element_size(), parameter) for parameter in self._parameters]
        weights = sum(size for size, _ in sizes)
        gradients = sum(size for size, parameter in sizes if parameter.requires_grad)
        kept = what_to_keep(weights, gradients, self._passes, free)
        elsewhere = any(parameter.requires_grad and parameter.dtype != self.sums for parameter in self._parameters)
        if elsewhere:
            kept = Kept(weights=kept.weights)
        if distributed.is_main():
            why = f"; gradients are added up in {str(self.sums).removeprefix('torch.')}" if elsewhere else ""
            print(f"{self.role}: {_in_words(kept, weights, gradients, free)}{why}", flush=True)
        return kept


def _in_words(kept: Kept, weights: int, gradients: int, free: int) -> str:
    """A text that says what is kept, and why."""
    if kept.gradients:
        what = "weights are gathered once and gradients are reduced once for all passes of an update"
    elif kept.weights:
        what = "weights are gathered once for all passes of an update, gradients are reduced in each"
    else:
        what = "weights are gathered and gradients are reduced in each pass"
    sizes = f"{weights / 1e9:.2f} and {gradients / 1e9:.2f} GB"
    return f"{what}: whole they take {sizes}, and {free / 1e9:.1f} GB are free on each rank"
