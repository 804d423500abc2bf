"""Frozen models that need no engine of their own, because one that trains can still compute what they do."""

import contextlib
from typing import Any

import torch

from engine.zero.engines import TrainedModel


class FrozenRole:
    """A frozen model within the engine of a trained one: without its adapters, or with frozen copies of what trains.

        reference = FrozenRole(actor, "reference")
        logprobs, _ = reference(sequences, attention_mask, position_ids, response_length=8)

    It is called and asked like a FrozenModel, and has no weights of its own.

    Args:
        host: around a module that computes as `role` when it is told to (`Backbone.take_role`).
        role: "reference" or "reward".
    """

    def __init__(self, host: TrainedModel, role: str):
        self.host, self.role = host, role

    @property
    def module(self) -> Any:
        """The Policy or Scorer that the host's module is in this role."""
        return self.host.module.as_role(self.role)

    @property
    def stage(self) -> int:
        """The host's ZeRO stage."""
        return self.host.stage

    @torch.no_grad()
    def __call__(self, *args, **kwargs):
        """The host's forward pass in this role, by its copy if there is one."""
        return self.host(*args, role=self.role, **kwargs)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Does nothing: a trained model always stands where it computes."""
        return self.host.on_device()
