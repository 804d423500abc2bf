"""An exponential moving average of the actor's weights."""

import contextlib

import torch

from engine.trace import traced
from engine.zero.engines import TrainedModel


class EMA:
    """ema <- decay * ema + (1 - decay) * actor, once per optimizer step, in float32.

    Kept as this rank's shards beside the actor's float32 master weights: in bfloat16 at a decay of 0.992 most of the
    movement would be rounded away, and a model or an engine of its own would cost a whole copy per rank.

    Source: `moving_average` in DeepSpeed-Chat (DeepSpeedExamples 83757d9c), where the decay is 0.992.
    """

    def __init__(self, actor: TrainedModel, decay: float, device: str | None = None):
        self.actor, self.decay = actor, decay
        self.shards = [shard.detach().clone().to(device or shard.device) for shard in actor.master_shards()]

    @traced("EMA update")
    @torch.no_grad()
    def update(self) -> None:
        """Take in the actor's weights after an optimizer step."""
        for mean, shard in zip(self.shards, self.actor.master_shards(), strict=True):
            mean.lerp_(shard.to(mean.device), 1.0 - self.decay)

    def swapped(self) -> contextlib.AbstractContextManager:
        """Context in which the actor computes, generates and saves with the averaged weights."""
        return self.actor.swapped(self.shards)

    def state_dict(self) -> dict:
        """This rank's shards."""
        return {"shards": self.shards}

    def load_state_dict(self, state: dict) -> None:
        """Put this rank's shards back."""
        for mean, shard in zip(self.shards, state["shards"], strict=True):
            mean.copy_(shard)
