"""Where the reference log-probs come from. A Protocol, since a reference need not be a model of its own."""

import contextlib
from typing import Protocol

import torch
from torch import Tensor

from engine.experience import Rollout
from engine.frozen_role import FrozenRole
from engine.trace import traced
from engine.zero.engines import FrozenModel


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
    """The SFT model: a frozen copy in an engine of its own, or what the actor's engine still has of it."""

    def __init__(self, model: FrozenModel | FrozenRole):
        self.model = model
        self.models = [model] if isinstance(model, FrozenModel) else []

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
        )
        return logprobs

    def on_device(self) -> contextlib.AbstractContextManager:
        """Context in which the weights are on the device."""
        return self.model.on_device()
