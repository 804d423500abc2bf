"""Frozen models that need no engine of their own, because one that trains can still compute what they do."""

import torch

from engine.zero.hosted_role import HostedRole


class FrozenRole(HostedRole):
    """A frozen model within the engine of a trained one: without its adapters, or with frozen copies of what trains.

        reference = FrozenRole(actor, "reference")
        logprobs, _ = reference(sequences, attention_mask, position_ids, response_length=8)

    It is called and asked like a FrozenModel, and has no weights of its own.

    role: "reference" or "reward".
    """

    @torch.no_grad()
    def __call__(self, *args, **kwargs):
        """The host's forward pass in this role, by its copy if there is one."""
        return super().__call__(*args, **kwargs)
