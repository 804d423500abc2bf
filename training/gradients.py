"""The gradients of one optimizer step, from micro-batches: forward and backward passes, in all three steps."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.zero.engines import TrainedModel
from engine.zero.roles import TrainedRole


def accumulate_gradients(
    model: TrainedModel | TrainedRole, shares: Sequence[Callable[[], Tensor]], last: bool = True
) -> Tensor:
    """Forward and backward pass of each weighted loss, equally many on all ranks; returns this rank's losses, (N,).

    last: whether the step follows, and no other model's passes within the same engine.
    """
    losses = []
    with model.host.accumulating(len(shares)):
        for index, share in enumerate(shares):
            loss = share()
            losses.append(loss.detach())
            model.backward(loss, last=last and index == len(shares) - 1)
    return torch.stack(losses)
