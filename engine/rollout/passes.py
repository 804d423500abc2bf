"""How a model reads tokens into the cache."""

import warnings

from torch import Tensor, nn

from engine import distributed
from engine.experience import position_ids
from engine.rollout.cache import SlotCache
from engine.rollout.families import takes_positions
from engine.trace import traced

FEWEST_ROWS = 8  # a pass over fewer takes a GPU as long: it reads the same weights


class Passes:
    """The model's own forward passes.

    Attributes:
        decoding: what reads single tokens, one of engine.rollout.decoding.DECODING but "auto".
        fallback: why the model's own code reads them, where another way was to; "" where none was, or it does.

    Args:
        model: a causal language model in eval mode.
        cache: where keys and values of what was read stand.
        slot_masks: whether the model takes the mask of a single token ready made (`takes_slot_masks`).
    """

    sees_all_slots = False  # whether passes see all of the cache's room, and not only what living rows have in it
    decoding, fallback = "plain", ""

    def __init__(self, model: nn.Module, cache: SlotCache, slot_masks: bool):
        self.model, self.cache, self.slot_masks = model, cache, slot_masks
        self.takes_positions = takes_positions(model)

    @traced("prompts")
    def prompts(self, ids: Tensor, mask: Tensor, first_row: int, end: int) -> Tensor:
        """Read prompts (B, N), left-padded, into rows from `first_row` on, with their last token in the slot before
        `end`; returns the logits behind them (B, V)."""
        start = end - ids.shape[1]
        self.cache.window.put(slice(first_row, first_row + len(ids)), start, start)
        return self._forward(ids, mask.long(), position_ids(mask))

    @traced("token")
    def tokens(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int, slot: int) -> Tensor:
        """Read one token (B, 1) of each of the first B rows into `slot`; returns the logits behind them (B, V).

        positions: (B, 1). mask: (rows, slots) of booleans, this slot included; nothing stands before slot `start`.
        """
        self.cache.window.put(slice(0, len(ids)), start, slot)
        seen = mask[: len(ids), start : slot + 1]
        return self._forward(ids, seen[:, None, None] if self.slot_masks else seen.long(), positions)

    def fall_back(self, decoding: str, reason: Exception) -> None:
        """Say that the model's own code reads single tokens from now on, in place of this way of decoding, and why."""
        self.fallback = next(iter(str(reason).splitlines()), "") or type(reason).__name__
        warnings.warn(
            f"rank {distributed.rank()}: single tokens of {type(self.model).__name__} cannot be {decoding} "
            f"({self.fallback}); its own code reads them",
            stacklevel=3,
        )

    def for_nothing(self, ids: Tensor) -> None:
        """A pass that leaves no trace, because other ranks' passes wait for this rank's."""
        self.model(input_ids=ids, use_cache=False)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        named = {"position_ids": positions} if self.takes_positions else {}
        return self.model(
            input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **named
        ).logits[:, -1]


def rows_of_shape(living: int, rows: int) -> int:
    """The least of rows, rows / 2, rows / 4 ... (rounded up), down to FEWEST_ROWS, that has room for the living ones:
    for passes whose shapes are to be few."""
    while rows >= 2 * max(living, FEWEST_ROWS):
        rows = -(-rows // 2)
    return rows
