"""What all kinds of copies of partitioned models have in common: what becomes of them between steps, and how memory
that runs out is survived."""

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from engine import distributed
from engine.distributed import RankGroup
from engine.errors import RunStopped
from engine.models.policy import Backbone
from engine.zero.accelerator import on_gpu
from engine.zero.engines import FrozenModel, TrainedModel

Model = TrainedModel | FrozenModel
Result = TypeVar("Result")
EXPERIENCE = "experience was made with it"


class PlainCopies(ABC):
    """Modules without ZeRO's hooks, which compute in place of models at stage 3.

    Args:
        between_steps: what becomes of the modules when `release_memory` is called: "keep" them, "free" them, or move
            them to the "host".
    """

    shared = True

    def __init__(self, between_steps: str = "keep"):
        self.between_steps, self._away = between_steps, False
        self.let_go: Callable[[], None] = lambda: None
        """Is called before modules are freed: whoever else holds one lets go of it."""
        self._together: Model | None = None  # whose passes are made, with one agreement for all

    @abstractmethod
    def of(self, model: Model, merged: bool = False) -> Backbone | None:
        """A module that computes what the model's own does, in eval mode where it is a copy (all ranks call this).

        At stages 0 to 2 that is the model's own. It is the caller's until the next call. None where a rank turned out
        not to have the memory for it, which a warning tells: the model is then to compute through its partitions.

        merged: a copy may hold the adapters' updates in its matrices; it then computes as the model's own role alone.
        """

    @abstractmethod
    def attempt(self, model: Model, doing: str, compute: Callable[[], Result]) -> Result | None:
        """What is computed with what `of` has given; None on all ranks where one ran out of memory: `of` is then to be
        asked again (all ranks call this).

        doing: "responses were drawn", for the warning. Raises: RunStopped where a rank cannot fall back.
        """

    @abstractmethod
    def group_of(self, model: Model) -> RankGroup | None:
        """The ranks that compute together with the model's copy; None where each does alone."""

    @abstractmethod
    def holding(self, model: Model) -> Backbone | None:
        """The module that holds the model's weights whole, as they are now and without updates merged into them, if one
        does; nothing is gathered, and all ranks are told the same."""

    @abstractmethod
    def free(self) -> None:
        """Let go of all modules."""

    @abstractmethod
    def _all(self) -> list[nn.Module]:
        """The modules."""

    def inferred(self, model: Model, *args, **kwargs) -> Any:
        """The forward pass by the model's copy, without autograd's bookkeeping; None where there is no memory for one
        (all ranks call this)."""
        if self._together is model:
            copy = self.of(model)
            assert copy is not None, "copies are given up where ranks agree, and here they do later"
            return _inferred(copy, *args, **kwargs)
        while (copy := self.of(model)) is not None:
            result = self.attempt(model, EXPERIENCE, partial(_inferred, copy, *args, **kwargs))
            if result is not None:
                return result
            del copy  # before another one is made
        return None

    def together(self, model: Model, make: Callable[[], Result]) -> Result:
        """What several passes of one model's give, with one agreement of all ranks on memory, and not one for each of
        them, at which each would wait for the slowest (all ranks call this).

        make: makes passes of this model by `inferred`, exchanges nothing else with other ranks, and can be made again.
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
        """Nothing is computed with the modules for a while."""
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
    """What `make` makes, and ""; None on all ranks where one ran out of memory, and what its error says.

    make: exchanges nothing with other ranks.
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
    """`PlainCopies.together`, where a model computes by copies, or in the engine of one that does; else what `make`
    makes."""
    host = getattr(model, "host", model)
    copies = getattr(host, "copies", None)
    return make() if copies is None else copies.together(host, make)


@contextlib.contextmanager
def stopped_if_out_of_memory(model: Model, doing: str) -> Iterator[None]:
    """Within this context ranks exchange what they compute with a model's copy, doing what: one that runs out of memory
    cannot go another way alone.

    Raises: RunStopped, with the flags that help.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunStopped(
            f"a copy of the {model.role} does not fit ({first_sentence(error)} on rank {distributed.rank()}, when "
            f"{doing}), and other ranks wait for that one. Set --rollout_backend zero3, which makes no copies, "
            "--replicas_between_steps free, or a smaller --per_device_generation_batch_size."
        ) from error


def warn_of(model: Model, doing: str, message: str, then: str) -> None:
    """Warn, once for all ranks, that a copy does not fit: doing what, what the error said, and what comes next."""
    if on_gpu():
        torch.cuda.empty_cache()
    if distributed.is_main():
        warnings.warn(
            f"a copy of the {model.role} does not fit ({message}, when {doing}): {then} from now on", stacklevel=3
        )


def first_sentence(error: BaseException) -> str:
    """Of an error's message."""
    return (str(error) or type(error).__name__).split(". ")[0]
