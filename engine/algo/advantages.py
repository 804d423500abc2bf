"""Advantages from rewards and values."""
import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the response slots.

        d_t = r_t + gamma V_{t+1} - V_t,   A_t = d_t + gamma lam A_{t+1},   R_t = A_t + V_t

    The value past the last slot is 0: a response that ends is a terminal state. Callers put zeros into `rewards` and
    `values` after a row's end, so that nothing flows back from there.

    Args:
        rewards, values: (B, T) float32; slot t holds the reward of response token t and the value before it.

    Returns: (advantages, returns), each (B, T) float32.

    Source: Schulman et al. 2016, "High-dimensional continuous control using GAE", eq. 16.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = error + gamma * lam * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values
