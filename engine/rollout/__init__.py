"""Ways to draw responses from the actor, behind one Protocol."""
from engine.ds_engine import TrainedModel
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.replica import ReplicaRollouts
from engine.rollout.zero3 import Zero3Rollouts

ROLLOUT_BACKENDS = {"replica": ReplicaRollouts, "zero3": Zero3Rollouts}


def build_rollouts(name: str, actor: TrainedModel, tokenizer) -> RolloutBackend:
    """The backend of this name; raises KeyError for one that is not in ROLLOUT_BACKENDS."""
    return ROLLOUT_BACKENDS[name](actor, tokenizer)


__all__ = ["ROLLOUT_BACKENDS", "RolloutBackend", "SamplingConfig", "build_rollouts"]
