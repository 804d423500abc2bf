"""All weights of a module at once, for what compares or saves small models."""

import torch
from torch import Tensor, nn

from engine.zero.gathering import gathered_state


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """A module's full weights in host memory on the main rank, and {} on others (all ranks call this)."""
    with gathered_state(module) as state:
        return {name: torch.empty(value.shape, dtype=value.dtype).copy_(value) for name, value in state.items()}
