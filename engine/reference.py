"""Where the reference log-probs come from. A Protocol, since a reference need not be a model of its own."""

import contextlib
from typing import Protocol

import torch
from torch import Tensor

from engine.ema import EMA
from engine.experience import Rollout
from engine.trace import traced
from engine.zero.engines import FrozenModel, FrozenRole, TrainedModel
from engine.zero.roles import TrainedRole


class Reference(Protocol):
    """Log-probs of a rollout's tokens under the policy that training started from, or one that follows the actor.

    models: the engines of its own that it has.
    """

    models: list[FrozenModel]

    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """(B, T) float32. All ranks call this together."""

    def on_device(self) -> contextlib.AbstractContextManager:
        """Context in which whatever is needed is on the device."""

    def after_step(self, steps: int) -> None:
        """So many PPO steps have been trained. All ranks call this together."""

    def moves(self, steps: int) -> int | None:
        """How often it has moved by the time that so many PPO steps have been trained; None for one that never does."""

    def is_actor(self, steps: int) -> bool:
        """Whether after so many PPO steps it has the weights that the actor has."""


class EngineReference:
    """The SFT model: a frozen copy in an engine of its own, or what the actor's engine still has of it."""

    def __init__(self, model: FrozenModel | FrozenRole):
        self.model = model
        self.models = [model] if isinstance(model, FrozenModel) else []

    @traced("reference")
    @torch.no_grad()
    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """(B, T) float32."""
        return _logprobs(self.model, rollout, temperature)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Context in which the weights are on the device."""
        return self.model.on_device()

    def after_step(self, steps: int) -> None:
        """Nothing changes: it is frozen."""

    def moves(self, steps: int) -> int | None:
        """None."""
        return None

    def is_actor(self, steps: int) -> bool:
        """Before the first step."""
        return steps == 0


class MovingReference:
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
        self.average, self.refresh_steps = average, refresh_steps
        self.model: TrainedModel | TrainedRole = average.actor
        self.models: list[FrozenModel] = []

    @property
    def kept(self) -> EMA | None:
        """The average, where nobody but the reference has it."""
        return self.average if self.refresh_steps is not None else None

    @traced("reference")
    @torch.no_grad()
    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """(B, T) float32; within `on_device`."""
        return _logprobs(self.model, rollout, temperature)

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


def _logprobs(
    model: FrozenModel | FrozenRole | TrainedModel | TrainedRole, rollout: Rollout, temperature: float
) -> Tensor:
    logprobs, _ = model(
        rollout.sequences,
        rollout.attention_mask,
        rollout.position_ids,
        response_length=rollout.response_length,
        temperature=temperature,
    )
    return logprobs
