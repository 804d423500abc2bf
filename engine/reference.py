"""The sources of reference log-probs: a frozen model, or a moving average of the actor's weights (`EMA`)."""

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
    """A moving average of the actor's weights: ema <- decay * ema + (1 - decay) * actor, after each optimizer step.

    Each rank keeps its shards of the average next to the actor's master weights. They are float32: in bfloat16, with a
    decay of 0.992, most changes would be rounded to nothing. A separate model or engine would take a whole copy per
    rank.

    Source: `moving_average` in DeepSpeed-Chat (DeepSpeedExamples 83757d9c), where the decay is 0.992.

    device: of the average; None for that of the master weights. name: name of its shards in a checkpoint.
    """

    def __init__(self, actor: TrainedModel | TrainedRole, decay: float, device: str | None = None, name: str = "ema"):
        self.actor, self.decay, self.name = actor, decay, name
        self.in_place = False
        """Whether the actor computes with the average at the moment (`swapped`)."""
        self.means = [
            shard.detach().to(device or shard.device, torch.float32, copy=True) for shard in actor.master_shards()
        ]

    @traced("EMA update")
    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the actor's weights, after an optimizer step."""
        for mean, shard in zip(self.means, self.actor.master_shards(), strict=True):
            mean.lerp_(shard.to(mean.device, mean.dtype), 1.0 - self.decay)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """A context in which the actor computes, generates and saves with the averaged weights (all ranks enter it)."""
        with self.actor.swapped(self.means):
            self.in_place = True
            try:
                yield
            finally:
                self.in_place = False

    def shards(self) -> list[Shard]:
        """This rank's part of the average, with names "NAME/PARAMETER". Over all ranks each number occurs exactly
        once."""
        state = self.actor.state
        return state.own(state.held(self.name, self.means))

    def load_shards(self, source: ShardSource) -> None:
        """Restore what `shards` returned, on any number of ranks and at any ZeRO stage."""
        read(source, self.actor.state.held(self.name, self.means))


class Reference:
    """The policy that training started from, for reference log-probs. It is a frozen model in its own engine, or a
    frozen role in the actor's engine.

    models: its own engine, if it has one.
    """

    def __init__(self, model: FrozenModel | FrozenRole | TrainedModel | TrainedRole):
        self.model = model
        self.models = [model] if isinstance(model, FrozenModel) else []

    @traced("reference")
    @torch.no_grad()
    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """The log-probs of the rollout's response tokens, (B, T) float32. Called within `on_device`, by all ranks
        together."""
        logprobs, _ = self.model(
            rollout.sequences,
            rollout.attention_mask,
            rollout.position_ids,
            response_length=rollout.response_length,
            temperature=temperature,
        )
        return logprobs

    def on_device(self) -> contextlib.AbstractContextManager:
        """A context in which the weights are on the device (all ranks enter it)."""
        return self.model.on_device()

    def after_step(self, steps: int) -> None:
        """Called after each PPO step (all ranks call this). steps: number of PPO steps so far. Nothing happens for a
        frozen model."""

    def moves(self, steps: int) -> int | None:
        """How often the reference has changed after `steps` PPO steps; None if it never changes."""
        return None

    def is_actor(self, steps: int) -> bool:
        """Whether the reference's weights equal the actor's after `steps` PPO steps. For a frozen model only before the
        first step."""
        return steps == 0


class MovingReference(Reference):
    """A reference that follows the actor: averaged weights, which replace the actor's weights in its engine while it
    computes.

        reference = MovingReference(ema)                                    # the moving average: WARP's anchor
        reference = MovingReference(EMA(actor, decay=0.0, name="reference"), refresh_steps=50)

    It has no engine of its own. For the weights that train (all, adapters, or last layers), each rank keeps float32
    shards next to the actor's master weights, and exchanges the two while the reference computes. Frozen weights are
    the same in both. The KL to this reference is not the KL to the model that training started from.

    average: the reference's weights. The trainer calls its `update` after each optimizer step, or `after_step` calls it
    every `refresh_steps` PPO steps:

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
        """The average, if it is only the reference's (and not also the run's moving average)."""
        return self.average if self.refresh_steps is not None else None

    def on_device(self) -> contextlib.AbstractContextManager:
        """A context in which the actor's engine computes with the reference's weights (all ranks enter it)."""
        return contextlib.nullcontext() if self.average.in_place else self.average.swapped()

    def after_step(self, steps: int) -> None:
        """Update the weights if a refresh is due."""
        if self.refresh_steps is not None and steps % self.refresh_steps == 0:
            self.average.update()

    def moves(self, steps: int) -> int | None:
        """The number of refreshes; for the moving average, the number of PPO steps."""
        return steps // (self.refresh_steps or 1)

    def is_actor(self, steps: int) -> bool:
        """Whether no step was made, or the latest step ended with a refresh that took the actor's weights unchanged."""
        refreshed = self.refresh_steps is not None and steps % self.refresh_steps == 0
        return steps == 0 or (refreshed and self.average.decay == 0.0)
