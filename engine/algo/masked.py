"""Sums, means and whitening over the positions that count."""

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The sum of `values` (any shape, float) where `mask` (same shape, bool) is set, over `dim` or, if it is None, over
    all dimensions.

    A value outside the mask does not change the sum, even if it is NaN.
    """
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum() if dim is None else kept.sum(dim)


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """The count, the sum and the sum of squares of the masked values: (3,) float64. To whiten over all ranks, callers
    sum these tensors over ranks."""
    wide = values.double()
    return torch.stack([mask.sum().double(), masked_sum(wide, mask), masked_sum(wide * wide, mask)])


def mean_and_variance(totals: Tensor, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and variance from the output of `moments`, which may be summed over ranks; (0, 0) if the count is 0."""
    count, total, squares = totals
    mean = total / count.clamp(min=1)
    spread = (squares - count * mean * mean).clamp(min=0)
    return mean, spread / (count - int(unbiased)).clamp(min=1)


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    center: bool = True,
    unbiased: bool = False,
    eps: float = 1e-8,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Scale the masked values to unit variance and, with `center`, to mean 0; zeros outside the mask.

        (x - mean) * rsqrt(var + eps)  [+ mean, unless centred]

    Args:
        values: any shape, float.
        mask: same shape, bool.
        center: whether to subtract the mean; if not, the mean stays as it is.
        unbiased: divide the squared deviations by n - 1 instead of n.
        statistics: the (mean, variance) to whiten with, for example over all ranks; by default those of the masked
            values.

    Source: `whiten` in openai/lm-human-preferences cbfd210b, lm_human_preferences/utils/core.py.
    """
    mean, variance = statistics or mean_and_variance(moments(values, mask), unbiased)
    white = (values.double() - mean) * torch.rsqrt(variance + eps)
    if not center:
        white = white + mean
    return torch.where(mask, white, torch.zeros_like(white)).to(values.dtype)
