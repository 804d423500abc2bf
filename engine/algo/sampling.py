"""Sampling with keyed random numbers. Each number depends on the seed, prompt, sample and position of the token that it
draws, and not on the rank or the batch."""

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), in wrapping int64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical right shift. Torch's own right shift copies the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = bits + _GAMMA
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def keyed_uniforms(seed: int, indices: Tensor, samples: Tensor, positions: Tensor | int) -> Tensor:
    """Uniform numbers in [0, 1) that depend only on (seed, prompt, sample, position).

    Args:
        seed: the run's seed.
        indices: (B,) int64, each prompt's index in the data.
        samples: (B,) int64, the number of each row among the samples of its prompt.
        positions: the response position of the token to be drawn, counted from 0: one number for all rows, or (B,)
            int64.

    Returns: (B,) float64, with 53 random bits.
    """
    if not isinstance(positions, Tensor):
        positions = torch.full_like(indices, positions)
    bits = torch.full_like(indices, seed)
    for key in (indices, samples, positions):
        bits = _mix(bits) ^ key
    return _shift_right(_mix(_mix(bits)), 11).double() * 2.0**-53


def sample_tokens(logits: Tensor, uniforms: Tensor, temperature: float = 1.0) -> Tensor:
    """Draws for each row the token at which the cumulative probability passes the row's uniform number (inverse-CDF
    sampling).

    Args:
        logits: (B, V) in any float dtype.
        uniforms: (B,) float64 in [0, 1).
        temperature: the number that the logits are divided by. The distribution is not truncated (no top_k, no top_p).

    Returns: (B,) int64. The probabilities are computed in float32 and added up in float64, so that rounding changes no
    token's probability by more than 1e-7. A token of probability 0 is never drawn.
    """
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    targets = (uniforms * cumulative[:, -1]).unsqueeze(-1)
    # right=True: the first token whose cumulative probability is *over* the target, hence not one of probability 0.
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    last_possible = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.minimum(tokens, last_possible)
