"""The rows that are decoded side by side, as the model sees them."""

import torch
from torch import Tensor

from engine.rollout.cache import SlotCache


class Batch:
    """Rows of the cache whose tokens all end before one slot, where their next ones are written (see SlotCache).

    Attributes:
        slot: where the next token of each row is written.
        mask: (rows, slots) bool, which slots of the cache hold a token of the row.
        pending: (B, 1) int64, the last tokens of the B rows in use, which the model has not read yet.

    Args:
        cache: with room for as many rows and slots. slots: that there are until rows are moved to the left.
        slot: where the first token after the longest prompt is written.
    """

    def __init__(self, cache: SlotCache, rows: int, slots: int, slot: int, device: torch.device):
        self.cache, self.slot = cache, slot
        self.mask = torch.zeros(rows, slots, dtype=torch.bool, device=device)
        self.pending = torch.zeros(0, 1, dtype=torch.int64, device=device)

    def join(self, prompts: Tensor, tokens: Tensor) -> None:
        """Add rows behind those in use, whose prompts stand in the cache before `slot`.

        prompts: (N, width) 0 or 1, left-padded masks. tokens: (N, 1), the first of their responses.
        """
        first, width = len(self.pending), prompts.shape[1]
        self.mask[first : first + len(prompts)] = False
        self.mask[first : first + len(prompts), self.slot - width : self.slot] = prompts.bool()
        self.pending = torch.cat([self.pending, tokens])

    def move(self, sources: list[int], targets: list[int], kept: int, longest: int) -> None:
        """Put rows in others' places, and keep the first `kept` in use. longest: tokens in the longest row."""
        if targets:
            old, new = torch.tensor([sources, targets], device=self.mask.device)
            self.cache.move_rows(old, new, self.slot - longest, self.slot)
            self.mask[new], self.pending[new] = self.mask[old], self.pending[old]
        self.pending = self.pending[:kept]

    def make_room(self, tokens: int, longest: int) -> None:
        """Have `tokens` slots to write to: where there are fewer, rows move so that the longest begins at slot 0.

        Prompts that still wait fit before the others' end, as none is longer than one that has been taken.
        """
        if self.slot + tokens <= self.mask.shape[1]:
            return
        rows, start = len(self.pending), self.slot - longest
        self.cache.shift(rows, start, self.slot, by=start)
        mask = self.mask[:rows, start : self.slot].clone()
        self.mask[:rows] = False
        self.slot = longest
        self.mask[:rows, :longest] = mask
