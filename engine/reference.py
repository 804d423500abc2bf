"""The sources of reference log-probs: a frozen model, or weights that follow the actor, such as a moving average
(`EMA`)."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.experience import Rollout
from engine.trace import traced
from engine.zero.engines import FrozenModel, FrozenRole, TrainedModel
from engine.zero.shared_engine import TrainedRole
from engine.zero.training_state import Shard, ShardSource, read


class EMA:
    """A moving average of the actor's weights: ema <- decay * ema + (1 - decay) * actor, after each optimizer step.

    Each rank keeps shards of the average that correspond to the rank's shards of the actor's master weights. The
    average is float32, because in bfloat16, with a decay of 0.992, most changes would be rounded to nothing. A separate
    model or engine would need a whole copy on each rank.

    Source: `moving_average` in DeepSpeed-Chat (DeepSpeedExamples 83757d9c), where the decay is 0.992.

    device: the device of the average; None for the device of the master weights.
    name: the name of the average's shards in a checkpoint.
    """

    def __init__(self, actor: TrainedModel | TrainedRole, decay: float, device: str | None = None, name: str = "ema"):
        self.actor = actor
        self.decay = decay
        self.name = name
        self.in_place = False
        """Whether the actor computes with the average at the moment (`swapped`)."""
        self.means = [
            shard.detach().to(device or shard.device, torch.float32, copy=True) for shard in actor.master_shards()
        ]

    @traced("EMA update")
    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the actor's weights. To be called after each optimizer step."""
        for mean, shard in zip(self.means, self.actor.master_shards(), strict=True):
            mean.lerp_(shard.to(mean.device, mean.dtype), 1.0 - self.decay)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """A context in which the actor computes, generates and saves with the averaged weights (all ranks enter it
        together)."""
        with self.actor.swapped(self.means):
            self.in_place = True
            try:
                yield
            finally:
                self.in_place = False

    def shards(self) -> list[Shard]:
        """This rank's part of the average, with names "NAME/PARAMETER". Each number of the average is in the part of
        exactly one rank."""
        state = self.actor.state
        return state.own(state.held(self.name, self.means))

    def load_shards(self, source: ShardSource) -> None:
        """Restore the average from shards that `shards` returned, even on another number of ranks or at another ZeRO
        stage."""
        read(source, self.actor.state.held(self.name, self.means))


class Reference:
    """The policy from which training started; it computes reference log-probs. It is a frozen model in an engine of its
    own, or a frozen role in the actor's engine.

    models: the reference's own engine, in a list; empty if it has none.
    """

    def __init__(self, model: FrozenModel | FrozenRole | TrainedModel | TrainedRole):
        self.model = model
        self.models = [model] if isinstance(model, FrozenModel) else []

    @traced("reference")
    @torch.no_grad()
    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """The reference's log-probs of the rollout's response tokens: (B, T) float32. To be called within the context
        `on_device`, by all ranks together."""
        logprobs, _ = self.model(
            rollout.sequences,
            rollout.attention_mask,
            rollout.position_ids,
            response_length=rollout.response_length,
            temperature=temperature,
        )
        return logprobs

    def on_device(self) -> contextlib.AbstractContextManager:
        """A context in which the reference's weights are on the device (all ranks enter it together)."""
        return self.model.on_device()

    def inferring(self) -> contextlib.AbstractContextManager:
        """A context for several calls of `ref_logprobs`, as TrainedModel.inferring."""
        return self.model.inferring()

    def after_step(self, steps: int) -> None:
        """To be called after each PPO step (all ranks call this together). steps: the number of PPO steps so far. For a
        frozen model nothing happens."""

    def moves(self, steps: int) -> int | None:
        """How often the reference has changed after `steps` PPO steps; None if it never changes."""
        return None

    def is_actor(self, steps: int) -> bool:
        """Whether the reference's weights equal the actor's after `steps` PPO steps. For a frozen model this is so only
        before the first step."""
        return steps == 0


class MovingReference(Reference):
    """A reference that follows the actor. It consists of averaged weights, which replace the actor's weights in the
    actor's engine while the reference computes.

        reference = MovingReference(ema)                                    # the moving average: WARP's anchor
        reference = MovingReference(EMA(actor, decay=0.0, name="reference"), refresh_steps=50)

    A moving reference has no engine of its own. For the weights that train (all weights, adapters, or the last layers),
    each rank keeps float32 shards in addition to the actor's master weights, and exchanges the two sets while the
    reference computes. Frozen weights are equal in actor and reference. The KL to this reference is not the KL to the
    model from which training started.

    average: the reference's weights. Without refresh_steps the trainer calls `average.update` after each optimizer
    step. With refresh_steps `after_step` calls it every `refresh_steps` PPO steps:

        reference <- alpha * actor + (1 - alpha) * reference,    alpha = 1 - average.decay

    Source of the moving average as anchor: Ramé et al. 2024, "WARP", section 3.1. Source of the refresh: Gorbatovski et
    al. 2024, "Learn Your Reference Model for Real Good Alignment" (TR-DPO); huggingface/trl v1.16.0,
    trl/trainer/callbacks.py, `SyncRefModelCallback`, which counts optimizer steps.
    """

    def __init__(self, average: EMA, refresh_steps: int | None = None):
        super().__init__(average.actor)
        self.average, self.refresh_steps = average, refresh_steps

    @property
    def kept(self) -> EMA | None:
        """The average if it belongs to the reference only; None if it is also the moving average of the run."""
        return self.average if self.refresh_steps is not None else None

    def on_device(self) -> contextlib.AbstractContextManager:
        """A context in which the actor's engine computes with the reference's weights (all ranks enter it together)."""
        return contextlib.nullcontext() if self.average.in_place else self.average.swapped()

    def after_step(self, steps: int) -> None:
        """Update the reference's weights if a refresh is due."""
        if self.refresh_steps is not None and steps % self.refresh_steps == 0:
            self.average.update()

    def moves(self, steps: int) -> int | None:
        """The number of refreshes after `steps` PPO steps; for the moving average, the number of PPO steps."""
        return steps // (self.refresh_steps or 1)

    def is_actor(self, steps: int) -> bool:
        """Whether the reference's weights equal the actor's: no step was made, or the latest step ended with a refresh
        that copied the actor's weights unchanged."""
        refreshed = self.refresh_steps is not None and steps % self.refresh_steps == 0
        return steps == 0 or (refreshed and self.average.decay == 0.0)
