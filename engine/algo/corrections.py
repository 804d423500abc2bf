"""How far the policy that learns is from the sampler that drew: in 16 bits, or in another engine, they are two."""

from torch import Tensor

FARTHEST = 20.0  # nats; e^20 is finite in float32 with room for sums, and means the same as all that is larger


def bounded(log_ratios: Tensor) -> Tensor:
    """Log-ratios (any shape) between -FARTHEST and FARTHEST, so that exp neither overflows nor becomes 0.

    Source of the bound: verl-project/verl be3e5054, verl/trainer/ppo/rollout_corr_helper.py, SAFETY_BOUND.
    """
    return log_ratios.clamp(-FARTHEST, FARTHEST)


def importance_ratios(log_ratios: Tensor) -> Tensor:
    """The policy's probability over the sampler's, from differences of log-probs (any shape, float32)."""
    return bounded(log_ratios).exp()
