"""Ways to draw responses from the actor, behind one Protocol."""

from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.choice import ROLLOUT_BACKENDS, build_rollouts
from engine.rollout.partitions import Zero3Rollouts
from engine.rollout.passes import DECODING
from engine.rollout.whole_copy import ReplicaRollouts

__all__ = [
    "DECODING",
    "ROLLOUT_BACKENDS",
    "ReplicaRollouts",
    "RolloutBackend",
    "SamplingConfig",
    "Zero3Rollouts",
    "build_rollouts",
]
