"""Merges the changes that several training runs made to the same tensor into one change.

Source: Ramé et al. 2024, "WARP: On the Benefits of Weight Averaged Rewarded Policies", section 3: SLERP of changes
(stage 2), and interpolation between the start and the merged weights (LITI, stage 3). The mean is that of Wortsman et
al. 2022, "Model soups".
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PARALLEL = 1e-6
"""In radians. If the angle between two changes is within this of 0 or pi, they count as parallel: no unique arc
connects them."""


def mean_change(changes: Sequence[Tensor]) -> Tensor:
    """The mean sum_i d_i / n of n changes d_i, float32 tensors of the same shape; the result has this shape too."""
    return sum(changes[1:], changes[0]) / len(changes)


def spherical_change(changes: Sequence[Tensor]) -> Tensor:
    """The changes merged one after the other: s_1 = d_1, s_m = slerp(s_(m-1), d_m; 1 / m); float32, all of one shape.

    The changes of independent runs are nearly orthogonal, so the norm of their mean is about 1 / sqrt(n) times the norm
    of one change. The spherical change keeps the norm of one change. WARP merges layer by layer; this function merges
    one tensor.
    """
    merged = changes[0]
    for number, change in enumerate(changes[1:], 2):
        merged = slerp(merged, change, 1.0 / number)
    return merged


def slerp(start: Tensor, end: Tensor, share: float) -> Tensor:
    """sin((1 - share) w) / sin w * start + sin(share * w) / sin w * end, where w is the angle between the two as
    vectors.

    The result is linear interpolation if `start` or `end` is 0, or if their directions are equal or opposite, because
    no unique arc connects them then.
    """
    lengths = start.norm() * end.norm()
    angle = torch.arccos(((start * end).sum() / lengths).clamp(-1.0, 1.0)) if lengths > 0 else torch.zeros(())
    if not PARALLEL < angle < torch.pi - PARALLEL:
        return torch.lerp(start, end, share)
    return (torch.sin((1 - share) * angle) * start + torch.sin(share * angle) * end) / torch.sin(angle)


METHODS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {"linear": mean_change, "slerp": spherical_change}
