"""Tokens from logits, each row at a temperature and from a nucleus of its own."""

import torch
from torch import Tensor

from engine.algo.sampling import sample_tokens

GREEDY_BELOW = 1e-5  # temperatures under it: the distribution is one token, and the logits would grow without bound


def draw(logits: Tensor, uniforms: Tensor, temperatures: Tensor, top_ps: Tensor) -> Tensor:
    """One token of each row, by its own uniform number: what is drawn depends on no other row.

    Args:
        logits: (B, V) in any float dtype.
        uniforms: (B,) float64 in [0, 1), as keyed_uniforms makes them.
        temperatures: (B,) float32; 0 for the most probable token.
        top_ps: (B,) float32 in (0, 1], the probability that the nucleus has at least (`nucleus`).

    Returns: (B,) int64.
    """
    greedy = temperatures < GREEDY_BELOW
    if greedy.all():
        return logits.argmax(-1)
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures).unsqueeze(1)
    if (top_ps < 1.0).any():
        scaled = nucleus(scaled, top_ps)
    return torch.where(greedy, logits.argmax(-1), sample_tokens(scaled, uniforms))


def nucleus(logits: Tensor, top_ps: Tensor) -> Tensor:
    """The logits (B, V), with -inf outside the smallest set of most probable tokens that has at least this probability.

    top_ps: (B,) in (0, 1]. Source: Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1.
    """
    probabilities, order = torch.softmax(logits.float(), -1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    left_out = (before >= top_ps.unsqueeze(1)) & (top_ps.unsqueeze(1) < 1.0)
    left_out[:, 0] = False  # of a top_p that float32 has no number for but 0, too
    return logits.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), -torch.inf)
