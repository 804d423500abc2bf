"""What an optimizer finds for gradients within a step of DeepSpeed's, which goes its way otherwise.

DeepSpeed calls the optimizer last, once for all groups or once for each, when gradients are float32, without the loss
scale, and where weights are partitioned in flat shards. A hook before that call is the one place that all stages have.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def without_gradients(adam: torch.optim.Optimizer, put_back: bool = False) -> contextlib.AbstractContextManager:
    """Within this context an optimizer finds no gradients in its steps, and so leaves weights and moments bit by bit.

    So DeepSpeed goes through a step of its own, with all that belongs to one: its counters, its buffers. put_back: the
    gradients' tensors are there again at the end; an offloaded optimizer has them once, and for good.
    """
    return _changed(adam, lambda parameter: None, put_back)


def scaled_gradients(
    adam: torch.optim.Optimizer, factors: Mapping[int, float | None]
) -> contextlib.AbstractContextManager:
    """Within this context an optimizer finds gradients times a factor, by the ids of its tensors; None: no gradient, so
    that weights and moments stay bit by bit."""
    return _changed(adam, lambda parameter: factors[id(parameter)])


@contextlib.contextmanager
def _changed(
    adam: torch.optim.Optimizer, factor_of: Callable[[Any], float | None], put_back: bool = False
) -> Iterator[None]:
    taken = []

    def change(optimizer: torch.optim.Optimizer, *_) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                factor = factor_of(parameter)
                if factor is None:
                    if put_back and parameter.grad is not None:
                        taken.append((parameter, parameter.grad))
                    parameter.grad = None
                elif parameter.grad is not None and factor != 1.0:
                    parameter.grad.mul_(factor)

    hook = adam.register_step_pre_hook(change)
    try:
        yield
    finally:
        hook.remove()
    for parameter, gradient in taken:
        parameter.grad = gradient
