"""Ways to draw responses from the actor, behind one Protocol."""

from engine.rollout.backends import ReplicaRollouts, Zero3Rollouts
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.choice import ROLLOUT_BACKENDS, build_rollouts
from engine.rollout.decoding import DECODING

__all__ = [
    "DECODING",
    "ROLLOUT_BACKENDS",
    "ReplicaRollouts",
    "RolloutBackend",
    "SamplingConfig",
    "Zero3Rollouts",
    "build_rollouts",
]
