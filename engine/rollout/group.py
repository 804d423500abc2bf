"""Rows of several ranks that are decoded together, because these hold one model together."""

from collections.abc import Sequence

import torch

from engine.distributed import RankGroup
from engine.experience import PromptBatch


def prompts_of_group(prompts: PromptBatch, group: RankGroup) -> tuple[PromptBatch, slice]:
    """The prompts of all ranks of the group, the same on each of them, and which rows are this rank's."""
    if group.size == 1:
        return prompts, slice(0, len(prompts))
    by_rank = group.all_objects(prompts.to("cpu"))
    first = sum(len(one) for one in by_rank[: group.place])
    return _joined(by_rank).to(prompts.input_ids.device), slice(first, first + len(prompts))


def _joined(batches: Sequence[PromptBatch]) -> PromptBatch:
    """Batches one after the other, padded on the left to one width; what is padded with is masked."""
    width = max(batch.input_ids.shape[1] for batch in batches)

    def columns(name: str) -> torch.Tensor:
        parts = [getattr(batch, name) for batch in batches]
        return torch.cat([torch.nn.functional.pad(part, (width - part.shape[1], 0)) for part in parts])

    return PromptBatch(
        columns("input_ids"),
        columns("attention_mask"),
        torch.cat([batch.indices for batch in batches]),
        torch.cat([batch.samples for batch in batches]),
    )
