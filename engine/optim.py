"""Optimizers and learning-rate schedules."""
import math

import torch
from torch import nn

from engine import distributed

# transformers' names; "constant_with_warmup" and "cosine_with_restarts" (of one cycle) are what they are there, and
# "constant" warms up too if steps of warm-up are given.
LR_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_restarts")


def build_optimizer(module: nn.Module, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
                    offload: bool) -> torch.optim.Optimizer:
    """AdamW, fused; DeepSpeed's C++ one where the optimizer's state lives in host memory beside a GPU.

    Vectors (biases, norms) are not decayed.
    """
    trained = [p for p in module.parameters() if p.requires_grad]

    def dimensions(parameter):
        return len(getattr(parameter, "ds_shape", parameter.shape))

    groups = [{"params": [p for p in trained if dimensions(p) > 1], "weight_decay": weight_decay},
              {"params": [p for p in trained if dimensions(p) <= 1], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if offload and torch.cuda.is_available():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        distributed.load_extension("CPUAdamBuilder")
        return DeepSpeedCPUAdam(groups, lr=lr, betas=betas, eps=eps, adamw_mode=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def lr_factor(step: int, total: int, warmup: int, schedule: str, warmup_from_zero: bool = False) -> float:
    """What the peak learning rate is multiplied by at optimizer step `step` (from 0) of `total`.

    After `warmup` steps of linear growth (the first at 1 / warmup, since a step of rate 0 is a step lost; or at 0, as
    transformers' schedules have it, with `warmup_from_zero`)
    constant schedules stay at 1, linear and cosine ones fall to 0 at the end.
    """
    if step < warmup:
        return (step + (not warmup_from_zero)) / warmup
    progress = min((step - warmup) / max(1, total - warmup), 1.0)
    if schedule in ("constant", "constant_with_warmup"):
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    if schedule in ("cosine", "cosine_with_restarts"):
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"schedule {schedule!r}: known are {', '.join(LR_SCHEDULES)}")
