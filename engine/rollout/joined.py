"""Prompts of several ranks, and rollouts of several calls or ranks, as one."""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import torch.nn.functional as F

from engine.distributed import RankGroup
from engine.experience import PromptBatch, Rollout


def prompts_of_group(prompts: PromptBatch, group: RankGroup) -> tuple[PromptBatch, slice]:
    """The prompts of all ranks of the group, the same on each of them, and which rows are this rank's."""
    if group.size == 1:
        return prompts, slice(0, len(prompts))
    by_rank = group.all_objects(prompts.to("cpu"))
    first = sum(len(one) for one in by_rank[: group.place])
    return _joined_prompts(by_rank).to(prompts.input_ids.device), slice(first, first + len(prompts))


def _joined_prompts(batches: Sequence[PromptBatch]) -> PromptBatch:
    """Batches one after the other, padded on the left to one width; what is padded with is masked."""
    width = max(batch.input_ids.shape[1] for batch in batches)

    def columns(name: str) -> torch.Tensor:
        parts = [getattr(batch, name) for batch in batches]
        return torch.cat([F.pad(part, (width - part.shape[1], 0)) for part in parts])

    return PromptBatch(
        columns("input_ids"),
        columns("attention_mask"),
        torch.cat([batch.indices for batch in batches]),
        torch.cat([batch.samples for batch in batches]),
    )


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
