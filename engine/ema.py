"""An exponential moving average of the actor's weights."""

import contextlib
from collections.abc import Iterator

import torch

from engine.trace import traced
from engine.zero.engines import TrainedModel
from engine.zero.roles import TrainedRole
from engine.zero.shards import Shard, ShardSource, read


class EMA:
    """ema <- decay * ema + (1 - decay) * actor, once per optimizer step, in float32.

    Kept as this rank's shards beside the actor's master weights, in float32 whatever those are in: in bfloat16 at a
    decay of 0.992 most of the movement would be rounded away, and a model or an engine of its own would cost a whole
    copy per rank.

    Source: `moving_average` in DeepSpeed-Chat (DeepSpeedExamples 83757d9c), where the decay is 0.992.

    name: under which its shards stand in a restart point.
    """

    def __init__(self, actor: TrainedModel | TrainedRole, decay: float, device: str | None = None, name: str = "ema"):
        self.actor, self.decay, self.name = actor, decay, name
        self.in_place = False
        """Whether the actor computes with the averages just now (`swapped`)."""
        self.means = [
            shard.detach().to(device or shard.device, torch.float32, copy=True) for shard in actor.master_shards()
        ]

    @traced("EMA update")
    @torch.no_grad()
    def update(self) -> None:
        """Take in the actor's weights after an optimizer step."""
        for mean, shard in zip(self.means, self.actor.master_shards(), strict=True):
            mean.lerp_(shard.to(mean.device, mean.dtype), 1.0 - self.decay)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Context in which the actor computes, generates and saves with the averaged weights (all ranks enter it)."""
        with self.actor.swapped(self.means):
            self.in_place = True
            try:
                yield
            finally:
                self.in_place = False

    def shards(self) -> list[Shard]:
        """This rank's part of the averages, named "ema/PARAMETER"; over all ranks each number comes exactly once."""
        state = self.actor.state
        return state.own(state.held(self.name, self.means))

    def load_shards(self, source: ShardSource) -> None:
        """Put back what `shards` gave, on whatever ranks and at whatever stage."""
        read(source, self.actor.state.held(self.name, self.means))
