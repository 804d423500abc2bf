"""Rollout backends: several ways to draw responses from the actor, behind one base class."""

from engine.rollout.backends import ReplicaRollouts, Zero3Rollouts
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.choice import ROLLOUT_BACKENDS, build_rollouts
from engine.rollout.conversations import Conversations
from engine.rollout.environments import Environments, Reply, Turn
from engine.rollout.passes import DECODING
from engine.rollout.vllm_rollouts import SAMPLERS, VLLMRollouts

__all__ = [
    "DECODING",
    "ROLLOUT_BACKENDS",
    "SAMPLERS",
    "Conversations",
    "Environments",
    "ReplicaRollouts",
    "Reply",
    "RolloutBackend",
    "SamplingConfig",
    "Turn",
    "VLLMRollouts",
    "Zero3Rollouts",
    "build_rollouts",
]
