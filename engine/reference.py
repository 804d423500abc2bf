"""Where the reference log-probs come from. A Protocol, since a reference need not be a model of its own."""

import contextlib
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from engine.experience import Rollout
from engine.trace import traced
from engine.zero.engines import FrozenModel, TrainedModel


class Reference(Protocol):
    """Log-probs of a rollout's tokens under the policy that training started from.

    models: the engines of its own that it has.
    """

    models: list[FrozenModel]

    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """(B, T) float32. All ranks call this together."""

    def on_device(self) -> contextlib.AbstractContextManager:
        """Context in which whatever is needed is on the device."""


class EngineReference:
    """A frozen copy of the SFT model in an engine of its own."""

    settings: ClassVar[dict[str, str]] = {}  # of the forward pass

    def __init__(self, model: FrozenModel):
        self.model: FrozenModel | TrainedModel = model
        self.models = [model]

    @traced("reference")
    @torch.no_grad()
    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """(B, T) float32."""
        logprobs, _ = self.model(
            rollout.sequences,
            rollout.attention_mask,
            rollout.position_ids,
            response_length=rollout.response_length,
            temperature=temperature,
            **self.settings,
        )
        return logprobs

    def on_device(self) -> contextlib.AbstractContextManager:
        """Context in which the weights are on the device."""
        return self.model.on_device()


class HydraReference(EngineReference):
    """Frozen copies of the actor's last layers, within the actor's engine; the layers below are the actor's own.

    actor: around an `engine.models.hydra.HydraPolicy`.
    """

    settings: ClassVar[dict[str, str]] = {"role": "reference"}

    def __init__(self, actor: TrainedModel):
        self.model, self.models = actor, []
