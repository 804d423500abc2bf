"""Rollouts of several calls, or of several ranks, as one."""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import torch.nn.functional as F

from engine.experience import Rollout


def copied(rollout: Rollout, device: torch.device | str) -> Rollout:
    """The same rows on this device, in memory of their own: what is sent of a view is all that it is a view of."""
    columns = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    return replace(
        rollout, **{name: column.to(device, copy=True) for name, column in columns.items() if column is not None}
    )


def joined(rollouts: Sequence[Rollout], pad_token_id: int) -> Rollout:
    """The rows of all, one behind the other, as wide as the longest prompt and the longest response among them.

    All have the sampler's log-probs and entropy, or none has.
    """
    pieces = [rollout.select(slice(None)) for rollout in rollouts]
    prompt = max(piece.prompt_length for piece in pieces)
    response = max(piece.response_length for piece in pieces)

    columns: dict[str, torch.Tensor] = {}
    for field in fields(Rollout):
        found = []
        for piece in pieces:
            tensor = getattr(piece, field.name)
            left, right = prompt - piece.prompt_length, response - piece.response_length
            if tensor is not None and tensor.dim() == 2:
                whole = field.name in ("sequences", "attention_mask")
                fill = pad_token_id if field.name == "sequences" else 0
                tensor = F.pad(tensor, (left if whole else 0, right), value=fill)
            found.append(tensor)
        if found[0] is not None:
            columns[field.name] = torch.cat(found)
    return Rollout(**columns)
