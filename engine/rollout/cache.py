"""The rows that are decoded side by side, and their keys and values, in memory that is allocated once."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

SLOTS = 16


class Window:
    """The part of the cache that a forward pass works in: these rows, and their slots [start, end) with earlier tokens.
    The pass writes from `end` on.

    at: (1,) int64, the slot where a single token is written instead, for passes with few different shapes. These see
    all slots up to an end that stays the same from token to token.
    """

    at: Tensor | None

    def __init__(self):
        self.put(slice(0, 0), 0, 0)

    def put(self, rows: slice, start: int, end: int) -> None:
        """Work here from now on."""
        self.rows, self.start, self.end, self.at = rows, start, end, None

    def put_at(self, rows: slice, at: Tensor, slots: int) -> None:
        """Work on single tokens of these rows from now on, in sight of the first `slots`."""
        self.rows, self.start, self.end, self.at = rows, 0, slots - 1, at


@dataclass(slots=True)
class Room:
    """How many rows and slots the cache has memory for."""

    rows: int = 0
    slots: int = 0


class SlotCache(Cache):
    """A Hugging Face cache in which the next token of every row is written at the same slot, whatever the row's length.

    A row's tokens are contiguous and end at that slot, as in left-padded prompts. So rows can join and leave at any
    time: the prompt of a new row is written so that it ends at the others' slot. Every family of models can use the
    cache, because a model sees an ordinary left-padded batch: the part of the memory given by `window`.
    """

    def __init__(self):
        self.window, self.room = Window(), Room()
        super().__init__(layer_class_to_replicate=lambda: _Slots(self.window, self.room))

    def reserve(self, rows: int, slots: int) -> None:
        """Allocate memory for so many rows and slots, unless the present memory is enough.

        Slots are rounded up to multiples of SLOTS, because attention kernels on GPUs copy masks of other widths.
        """
        slots = -(-slots // SLOTS) * SLOTS
        if rows > self.room.rows or slots > self.room.slots:
            rows, slots = max(rows, self.room.rows), max(slots, self.room.slots)
            self.free()
            self.room.rows, self.room.slots = rows, slots

    def free(self) -> None:
        """Give the memory back."""
        self.layers.clear()
        self.room.rows = self.room.slots = 0

    def move_rows(self, sources: Tensor, targets: Tensor, start: int, end: int) -> None:
        """Copy rows (N,) int64 over others (N,), within slots [start, end)."""
        for tensor in self.tensors():
            tensor[targets, :, start:end] = tensor[sources, :, start:end]

    def shift(self, rows: int, start: int, end: int, by: int) -> None:
        """Move slots [start, end) of the first `rows` rows to the left."""
        for tensor in self.tensors():
            tensor[:rows, :, start - by : end - by] = tensor[:rows, :, start:end].clone()

    def parts(self, rows: slice, slots: slice) -> tuple[Tensor, ...]:
        """Of each layer in turn keys and values (rows, heads, slots, d): views, which may be written to."""
        return tuple(tensor[rows, :, slots] for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Of each layer in turn keys and values (rows, heads, slots, d), of those that there are yet."""
        return [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]


def cache_bytes(model: PreTrainedModel, slots: int) -> int:
    """Memory for keys and values of so many slots, over all rows."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kept * width * slots * next(model.parameters()).element_size()


class GivenSlots(Cache):
    """A Hugging Face cache for one pass over single tokens, in tensors that are given.

    parts: of each layer in turn keys and values (B, heads, slots, d); the pass writes into the last slot.
    """

    def __init__(self, parts: tuple[Tensor, ...]):
        super().__init__(layers=[_Given(*pair) for pair in zip(parts[::2], parts[1::2])])


class _Given(CacheLayerMixin):
    """One layer of GivenSlots."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor):
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the tensors exist already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the last slot; returns all."""
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number and offset of the slots that the pass sees."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """How many slots stand before the pass."""
        return self.keys.shape[2] - 1

    def get_max_length(self) -> int:
        """No maximum length."""
        return -1


class _Slots(CacheLayerMixin):
    """One layer's keys and values, (rows, heads, slots, d)."""

    is_sliding = False

    def __init__(self, window: Window, room: Room):
        super().__init__()
        self.window, self.room = window, room

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate; zeros, because what a mask leaves out is still multiplied by 0."""
        self.keys, self.values = (
            states.new_zeros(self.room.rows, states.shape[1], self.room.slots, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write behind the window's end; returns all from its start on."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        rows, behind = window.rows, window.end + key_states.shape[-2]
        if window.at is not None:
            keys, values = self.keys[rows, :, : window.end + 1], self.values[rows, :, : window.end + 1]
            return keys.index_copy_(2, window.at, key_states), values.index_copy_(2, window.at, value_states)
        self.keys[rows, :, window.end : behind] = key_states
        self.values[rows, :, window.end : behind] = value_states
        return self.keys[rows, :, window.start : behind], self.values[rows, :, window.start : behind]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number and offset of the slots that a pass over `query_length` tokens sees."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """How many slots the window holds."""
        return self.window.end - self.window.start

    def get_max_length(self) -> int:
        """No maximum length."""
        return -1


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
        """Make sure that `tokens` slots are left to write to: if there are fewer, rows move left so that the longest
        begins at slot 0.

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
