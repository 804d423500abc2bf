"""Optimizers."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.algorithms.dialect import Dialect
from engine.engine_spec import OptimizerSpec
from engine.models.adapters import is_factor
from engine.zero.accelerator import on_gpu
from engine.zero.extensions import offloaded_adamw
from engine.zero.gathering import full_shape

OPTIMIZERS, DECAYS = Dialect.choices("optimizer"), Dialect.choices("decay")
# DeepSpeed-Chat decays all weights whose names contain none of these; it therefore decays GPT-2's ln_1 and ln_2 too.
# Source: microsoft/DeepSpeedExamples 83757d9c, dschat/utils/utils.py, get_optimizer_grouped_parameters.
NOT_DECAYED_BY_DEEPSPEED_CHAT = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")


class TensorFlowAdam(torch.optim.Optimizer):
    """Adam as in TensorFlow, which adds epsilon to the root of the uncorrected second moment.

        lr_t = lr sqrt(1 - b2^t) / (1 - b1^t),   m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
        p -= lr_t m / (sqrt(v) + eps)

    PyTorch divides the root by sqrt(1 - b2^t) before it adds eps. In the first steps this divisor is small (0.03 at t =
    1 and b2 = 0.999). Here eps therefore has 1 / sqrt(1 - b2^t) times as much effect, and small gradients change their
    weights less.

    The update is elementwise, and its state is kept per parameter, so that it also works on ZeRO's flat shards. There
    is no weight decay.

    Source: Kingma and Ba 2015, end of section 2 ("epsilon hat"); tensorflow/tensorflow, `tf.train.AdamOptimizer`.
    """

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient. Returns the result of `closure` if it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update([p for p in group["params"] if p.grad is not None], group["lr"], group["betas"], group["eps"])
        return loss

    def _update(self, params: list, lr: float, betas: tuple[float, float], eps: float) -> None:
        if not params:
            return
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            state["step"] += 1
        states = [self.state[param] for param in params]
        gradients = [param.grad for param in params]
        first, second = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(first, gradients, 1 - betas[0])
        torch._foreach_mul_(second, betas[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - betas[1])
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, eps)
        steps = [float(state["step"]) for state in states]
        torch._foreach_addcdiv_(
            params, first, roots, [-lr * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step) for step in steps]
        )


def build_optimizer(
    module: nn.Module, spec: OptimizerSpec, offload: bool, lora_lr: float | None = None
) -> torch.optim.Optimizer:
    """The optimizer for the trained parameters of a module.

    offload: whether the optimizer state is in host memory while the model is on a GPU. lora_lr: the learning rate of
    LoRA factors. Factors are in parameter groups of their own, whose "lr_ratio" is lora_lr / spec.lr.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    return optimizer_of(optimizer_groups(trained, spec, lora_lr), spec, offload)


def optimizer_groups(
    trained: Mapping[str, nn.Parameter], spec: OptimizerSpec, lora_lr: float | None = None
) -> list[dict]:
    """The parameter groups of an optimizer. The parameters of a group have the same weight decay and the same ratio to
    the learning rate. trained: {name: parameter}. Other arguments: as in `build_optimizer`."""
    form, decay = spec.form, spec.decay
    if form not in OPTIMIZERS:
        raise ValueError(f"optimizer {form!r}: known are {', '.join(OPTIMIZERS)}")
    if decay not in DECAYS:
        raise ValueError(f"decay {decay!r}: known are {', '.join(DECAYS)}")
    assert form == "adamw" or not spec.weight_decay, f"weight decay {spec.weight_decay} with {form}, which has none"

    def decays(name: str, parameter: nn.Parameter) -> bool:
        if form == "tf_adam":
            return True  # without weight decay one group is enough
        if decay == "deepspeed_chat":
            return not any(part in name.lower() for part in NOT_DECAYED_BY_DEEPSPEED_CHAT)
        return len(full_shape(parameter)) > 1

    if lora_lr is not None and spec.lr == 0:
        raise ValueError(f"LoRA factors learn at {lora_lr} where other weights learn at 0, of which it is no multiple")
    kinds: dict[tuple[bool, bool], list] = {(lora, matrix): [] for lora in (False, True) for matrix in (True, False)}
    for name, parameter in trained.items():
        kinds[lora_lr is not None and is_factor(name), decays(name, parameter)].append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": spec.weight_decay if decays_too or decay == "all" else 0.0,
            "lr_ratio": lora_lr / spec.lr if lora and lora_lr is not None else 1.0,
        }
        for (lora, decays_too), parameters in kinds.items()
        if parameters
    ]


def optimizer_of(groups: list[dict], spec: OptimizerSpec, offload: bool) -> torch.optim.Optimizer:
    """The optimizer for these parameter groups. For the form "adamw" it is fused AdamW, or DeepSpeed's AdamW in C++ if
    the optimizer state is in host memory while the model is on a GPU. For "tf_adam" it is TensorFlowAdam in both
    cases."""
    settings: dict[str, Any] = {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps}
    if spec.form == "tf_adam":
        return TensorFlowAdam(groups, **settings)
    if offload and on_gpu():
        return offloaded_adamw(groups, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)
