"""What an engine knows of the plain modules that compute in its model's place."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import nn

Result = TypeVar("Result")


class Copies(Protocol):
    """Plain modules that compute what models (a TrainedModel, a FrozenModel) do; `engine.plain_copies.PlainCopies`."""

    def inferred(self, model: Any, *args, **kwargs) -> Any:
        """The forward pass without gradients or hooks; None for lack of memory. All ranks call this together."""

    def holding(self, model: Any) -> nn.Module | None:
        """The module that holds the model's own weights as they are now, if one does."""

    def together(self, model: Any, make: Callable[[], Result]) -> Result:
        """What several passes of the model give; ranks agree on memory once."""
