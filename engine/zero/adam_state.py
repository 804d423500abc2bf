"""What Adam remembers of a tensor, two moments and a step count, and what it finds for gradients within a step.

The three forms (AdamW of PyTorch, DeepSpeedCPUAdam, TensorFlowAdam) have the same names in `adam.state[tensor]`, which
is empty before the tensor's first step. They differ in what the count is: a tensor, on the device or not, or an int.

DeepSpeed calls the optimizer last, once for all groups or once for each, when gradients are float32, without the loss
scale, and where weights are partitioned in flat shards. A hook before that call is the one place that all stages have.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def steps_of(adam: torch.optim.Optimizer, tensor: Tensor) -> int:
    """How many steps a tensor has been through; 0 where Adam remembers nothing of it."""
    return int(adam.state[tensor].get("step", 0)) if tensor in adam.state else 0


def moment_of(adam: torch.optim.Optimizer, tensor: Tensor, moment: str) -> Tensor | None:
    """A tensor's moment, in the tensor's shape; None before its first step."""
    return adam.state[tensor].get(moment) if tensor in adam.state else None


def set_steps(adam: torch.optim.Optimizer, tensor: Tensor, steps: int) -> None:
    """Have Adam remember so many steps of a tensor, with moments of 0 where it remembers none yet."""
    if not steps:
        adam.state.pop(tensor, None)
        return
    state = adam.state[tensor]
    for moment in MOMENTS:
        if moment not in state:
            state[moment] = torch.zeros_like(tensor, requires_grad=False)
    if _is_cpp(adam):
        state["step"] = steps
    else:
        on_device = any(group.get("fused") or group.get("capturable") for group in adam.param_groups)
        state["step"] = torch.tensor(float(steps), device=tensor.device if on_device else "cpu")


def settle(adam: Any, steps: int) -> None:
    """Bring what DeepSpeedCPUAdam has outside of its state to where so many steps leave it.

    In C++ it multiplies beta^t up from step to step, in float32, and takes the power where a step does not follow the
    one before: a restart would go on with other last bits. So the steps are gone through on a single number.
    """
    if not _is_cpp(adam):
        return
    group = adam.param_groups[0]
    number = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, True, *number)


def _is_cpp(adam: torch.optim.Optimizer) -> bool:
    return hasattr(adam, "ds_opt_adam")


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
