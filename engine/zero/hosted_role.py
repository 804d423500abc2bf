"""Models that have no engine of their own: each is one of the roles that a trained model's engine plays."""

import contextlib
from typing import Any

from engine.zero.engines import TrainedModel


class HostedRole:
    """A model within the engine of another one. It is called and asked like a TrainedModel or FrozenModel.

    Args:
        host: around a module that computes as `role` when it is told to (`Backbone.take_role`).
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

    def __call__(self, *args, **kwargs):
        """The host's forward pass in this role, by its copy if there is one and no gradient is wanted."""
        return self.host(*args, role=self.role, **kwargs)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Does nothing: a trained model always stands where it computes."""
        return self.host.on_device()
