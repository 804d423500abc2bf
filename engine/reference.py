"""Where the reference log-probs come from: a frozen model, or a moving average of the actor's weights (`EMA`)."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.experience import Rollout
from engine.trace import traced
from engine.zero.engines import FrozenModel, FrozenRole, TrainedModel
from engine.zero.roles import TrainedRole
from engine.zero.shards import Shard, ShardSource, read


class EMA:
    """ema <- decay * ema + (1 - decay) * actor, once per optimizer step, in float32.

    Kept as this rank's shards beside the actor's master weights, in float32 whatever those are in: in bfloat16 at a
    decay of 0.992 most of the movement would be rounded away, and a model or an engine of its own would cost a whole
    copy per rank.

    Source: `moving_average` in DeepSpeed-Chat (DeepSpeedExamples 83757d9c), where the decay is 0.992.

    name: under which its shards stand in a checkpoint.
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


class Reference:
    """Log-probs of a rollout's tokens under the policy that training started from: a frozen model in an engine of its
    own, or what the actor's engine still has of it.

    models: the engines of its own that it has.
    """

    def __init__(self, model: FrozenModel | FrozenRole | TrainedModel | TrainedRole):
        self.model = model
        self.models = [model] if isinstance(model, FrozenModel) else []

    @traced("reference")
    @torch.no_grad()
    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """(B, T) float32; within `on_device`. All ranks call this together."""
        logprobs, _ = self.model(
            rollout.sequences,
            rollout.attention_mask,
            rollout.position_ids,
            response_length=rollout.response_length,
            temperature=temperature,
        )
        return logprobs

    def on_device(self) -> contextlib.AbstractContextManager:
        """Context in which whatever is needed is on the device (all ranks enter it)."""
        return self.model.on_device()

    def after_step(self, steps: int) -> None:
        """So many PPO steps have been trained: a frozen model stays as it is. All ranks call this together."""

    def moves(self, steps: int) -> int | None:
        """How often it has moved by the time that so many PPO steps have been trained; None for one that never does."""
        return None

    def is_actor(self, steps: int) -> bool:
        """Whether after so many PPO steps it has the weights that the actor has: a frozen one before the first."""
        return steps == 0


class MovingReference(Reference):
    """A reference that follows the actor: averaged weights, which take the place of the actor's own in its engine.

        reference = MovingReference(ema)                                    # the moving average: WARP's anchor
        reference = MovingReference(EMA(actor, decay=0.0, name="reference"), refresh_steps=50)

    It has no engine of its own: its weights are this rank's float32 shards beside the actor's master weights, whatever
    is trained (all weights, adapters, last layers), and are exchanged with these while it computes. What does not train
    is the same in both. KL to it says nothing of how far the actor is from the model that training started from.

    average: `update`d by whoever trains, once per optimizer step; or by `after_step` every `refresh_steps` PPO steps:

        reference <- alpha * actor + (1 - alpha) * reference,    alpha = 1 - average.decay

    Source: the moving average as anchor Ramé et al. 2024, "WARP", section 3.1; the refresh Gorbatovski et al. 2024,
    "Learn Your Reference Model for Real Good Alignment" (TR-DPO), as huggingface/trl v1.16.0, trl/trainer/callbacks.py,
    `SyncRefModelCallback` has it, which counts optimizer steps.
    """

    def __init__(self, average: EMA, refresh_steps: int | None = None):
        super().__init__(average.actor)
        self.average, self.refresh_steps = average, refresh_steps

    @property
    def kept(self) -> EMA | None:
        """The average, where nobody but the reference has it."""
        return self.average if self.refresh_steps is not None else None

    def on_device(self) -> contextlib.AbstractContextManager:
        """Context in which the actor's engine computes with the reference's weights (all ranks enter it)."""
        return contextlib.nullcontext() if self.average.in_place else self.average.swapped()

    def after_step(self, steps: int) -> None:
        """Refresh it, where it is time to."""
        if self.refresh_steps is not None and steps % self.refresh_steps == 0:
            self.average.update()

    def moves(self, steps: int) -> int | None:
        """Refreshes; of the moving average PPO steps."""
        return steps // (self.refresh_steps or 1)

    def is_actor(self, steps: int) -> bool:
        """Before the first step, and after a refresh that takes the actor's weights as they are."""
        refreshed = self.refresh_steps is not None and steps % self.refresh_steps == 0
        return steps == 0 or (refreshed and self.average.decay == 0.0)
