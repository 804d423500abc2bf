"""The batch of rows that is being decoded, and the cache of the keys, values and states of these rows. The cache's
memory is allocated once."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

SLOTS = 16


class Window:
    """The part of the cache that a forward pass uses. rows: the rows of the pass's batch. start, end: slots start to
    end - 1 hold the tokens that were read before, and the pass writes from slot `end` on.

    at: (1,) int64, or None. If it is given, the pass reads a single token, writes it into the slot `at`, and attends to
    the slots 0 to end - 1. The shapes then depend on `end` only, so that they can be the same for many tokens.
    """

    at: Tensor | None

    def __init__(self):
        self.put(slice(0, 0), 0, 0)

    def put(self, rows: slice, start: int, end: int) -> None:
        """Set the window of the next pass."""
        self.rows = rows
        self.start = start
        self.end = end
        self.at = None

    def put_at(self, rows: slice, at: Tensor, slots: int) -> None:
        """Set the window of a pass over one token per row. The tokens are written into slot `at` and attend to the
        first `slots` slots."""
        self.rows = rows
        self.start = 0
        self.end = slots - 1
        self.at = at


@dataclass(slots=True)
class Room:
    """How many rows and slots the cache has memory for."""

    rows: int = 0
    slots: int = 0


class SlotCache(Cache):
    """A Hugging Face cache in which the next token of every row is written into the same slot.

    The tokens of each row are contiguous and end at the common slot, as in a left-padded batch. Rows can join and leave
    at any time: the prompt of a new row is written so that it ends where the other rows end. All model families can use
    this cache, because a model sees only the part of the memory in `window`, which is an ordinary left-padded batch.

    Layers of linear attention and convolutions keep one state per row instead of keys and values in slots. A pass over
    prompts begins the states of its rows anew, and a pass over single tokens goes on with them.
    """

    def __init__(self):
        self.window, self.room = Window(), Room()
        super().__init__(layers=_Layers(lambda: _Slots(self.window, self.room)))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a pass goes on with states that earlier passes left; the same for all layers."""
        return self.window.end > self.window.start

    def reserve(self, rows: int, slots: int) -> None:
        """Allocate memory for this many rows and slots, unless the cache already has enough.

        The number of slots is rounded up to a multiple of SLOTS: attention kernels on GPUs copy masks whose width is
        not such a multiple.
        """
        slots = -(-slots // SLOTS) * SLOTS
        if rows > self.room.rows or slots > self.room.slots:
            rows, slots = max(rows, self.room.rows), max(slots, self.room.slots)
            self.free()
            self.room.rows, self.room.slots = rows, slots

    def free(self) -> None:
        """Free the memory."""
        self.layers.clear()
        self.room.rows = self.room.slots = 0

    def move_rows(self, sources: Tensor, targets: Tensor, start: int, end: int) -> None:
        """Copy the slots [start, end) and the states of rows `sources`, (N,) int64, into the same slots and the states
        of rows `targets`, (N,) int64."""
        for tensor in self.tensors():
            tensor[targets, :, start:end] = tensor[sources, :, start:end]
        for state in self.states():
            state[targets] = state[sources]

    def shift(self, rows: int, start: int, end: int, by: int) -> None:
        """Move the slots [start, end) of the first `rows` rows to the left by `by` slots."""
        for tensor in self.tensors():
            tensor[:rows, :, start - by : end - by] = tensor[:rows, :, start:end].clone()

    def parts(self, rows: slice, slots: slice) -> tuple[Tensor, ...]:
        """Views of these rows and slots: for each layer the keys, then the values, (rows, heads, slots, d). Writing to
        a view changes the cache."""
        return tuple(tensor[rows, :, slots] for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """For each layer that has been allocated the keys, then the values, (rows, heads, slots, d)."""
        return [tensor for layer in self.layers if layer.is_initialized for tensor in (layer.keys, layer.values)]

    def states(self) -> list[Tensor]:
        """The states of all layers that keep some, each (rows, ...)."""
        return [state for layer in self.layers for state in layer.memory.values()]


class GivenSlots(SlotCache):
    """A cache of given tensors, for one pass over one token per row.

    parts: for each layer the keys, then the values, (B, heads, slots, d). The pass writes into the last slot.
    """

    def __init__(self, parts: tuple[Tensor, ...]):
        super().__init__()
        self.layers = [_Given(*pair) for pair in zip(parts[::2], parts[1::2])]


class _Layers(list):
    """The layers of a cache. A layer is made when it is first asked for, since only the model knows how many there
    are."""

    def __init__(self, make: Callable[[], CacheLayerMixin]):
        super().__init__()
        self.make = make

    def __getitem__(self, number):
        while isinstance(number, int) and number >= len(self):
            self.append(self.make())
        return super().__getitem__(number)


class _Slots(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """What one layer keeps: keys and values, (rows, heads, slots, d), or states, or both.

    memory: {("conv" or "recurrent", number): (rows, ...)}, the last inputs of a convolution or the state of a
    recurrence. A layer may keep several of each.
    """

    is_sliding = False
    record_past = False

    def __init__(self, window: Window, room: Room):
        CacheLayerMixin.__init__(self)
        self.window, self.room = window, room
        self.memory: dict[tuple[str, int], Tensor] = {}

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """{number of a state: whether the pass goes on with it}."""
        goes_on = self.get_seq_length() > 0
        return defaultdict(lambda: goes_on, {0: goes_on})

    @property
    def conv_states(self) -> dict[int, Tensor]:
        """{number: the window's rows of the inputs that a convolution keeps}. Writing to them changes the cache."""
        return self._states("conv")

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        """{number: the window's rows of the state of a recurrence}. Writing to them changes the cache."""
        return self._states("recurrent")

    def _states(self, kind: str) -> dict[int, Tensor]:
        return {number: state[self.window.rows] for (name, number), state in self.memory.items() if name == kind}

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs
    ) -> Tensor:
        """Keep the last `conv_kernel_size` (default: all) of the new inputs (B, channels, N); returns the kept and the
        new inputs, which are what the convolution reads."""
        kept = conv_kernel_size or conv_states.shape[-1]
        if self.has_previous_state[state_idx]:
            conv_states = torch.cat([self.conv_states[state_idx], conv_states], -1)
            kept = self.conv_states[state_idx].shape[-1]
        elif conv_states.shape[-1] < kept:
            conv_states = F.pad(conv_states, (kept - conv_states.shape[-1], 0))
        self._keep(("conv", state_idx), conv_states[..., -kept:])
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        """Keep the state (B, ...); returns it."""
        return self._keep(("recurrent", state_idx), recurrent_states)

    def _keep(self, name: tuple[str, int], state: Tensor) -> Tensor:
        if name not in self.memory:
            self.memory[name] = state.new_zeros(self.room.rows, *state.shape[1:])
        self.memory[name][self.window.rows] = state
        return state

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeros. Uninitialised memory would not do: attention multiplies masked values by 0, which gives NaN
        if they are NaN."""
        self.keys, self.values = (
            states.new_zeros(self.room.rows, states.shape[1], self.room.slots, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the new keys and values into the slots from the window's end on; returns the keys and values from the
        window's start on."""
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
        """Returns (number, offset) of the slots that a pass over `query_length` tokens attends to."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """The number of slots in the window."""
        return self.window.end - self.window.start

    def get_max_length(self) -> int:
        """No maximum length."""
        return -1


class _Given(_Slots):
    """One layer of GivenSlots."""

    def __init__(self, keys: Tensor, values: Tensor):
        super().__init__(Window(), Room())
        self.keys = keys
        self.values = values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the new keys and values into the last slot; returns all keys and values."""
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """The number of slots that were filled before the pass."""
        return self.keys.shape[2] - 1


class Batch:
    """The rows of the cache that are in use. The next token of every row is written into the same slot (see SlotCache).

    Attributes:
        slot: the slot that the next tokens are written into.
        mask: (rows, slots) bool, which slots of the cache hold a token of the row.
        pending: (B, 1) int64, the latest drawn token of each of the B rows in use, which the model has not read yet.

    Args:
        cache: a cache with memory for at least `rows` rows and `slots` slots. slot: the initial value of the attribute
            `slot`.
    """

    def __init__(self, cache: SlotCache, rows: int, slots: int, slot: int, device: torch.device):
        self.cache, self.slot = cache, slot
        self.mask = torch.zeros(rows, slots, dtype=torch.bool, device=device)
        self.pending = torch.zeros(0, 1, dtype=torch.int64, device=device)

    def join(self, prompts: Tensor, tokens: Tensor) -> None:
        """Add N rows after the rows in use. The prompts of the new rows are already in the cache and end before `slot`.

        prompts: (N, width), the attention masks of the left-padded prompts. tokens: (N, 1) int64, the first token of
        each response.
        """
        first, width = len(self.pending), prompts.shape[1]
        self.mask[first : first + len(prompts)] = False
        self.mask[first : first + len(prompts), self.slot - width : self.slot] = prompts.bool()
        self.pending = torch.cat([self.pending, tokens])

    def move(self, sources: list[int], targets: list[int], kept: int, longest: int) -> None:
        """Move the rows `sources` to the rows `targets`, then keep the first `kept` rows. longest: the number of tokens
        in the longest row."""
        if targets:
            old, new = torch.tensor([sources, targets], device=self.mask.device)
            self.cache.move_rows(old, new, self.slot - longest, self.slot)
            self.mask[new], self.pending[new] = self.mask[old], self.pending[old]
        self.pending = self.pending[:kept]

    def make_room(self, tokens: int, longest: int) -> None:
        """Make sure that `tokens` free slots follow `slot`. If fewer are free, all rows move to the left until the
        longest row begins at slot 0. longest: the number of tokens in the longest row.

        After the move, waiting prompts still fit before `slot`, because no waiting prompt is longer than an earlier
        one.
        """
        if self.slot + tokens <= self.mask.shape[1]:
            return
        rows, start = len(self.pending), self.slot - longest
        self.cache.shift(rows, start, self.slot, by=start)
        mask = self.mask[:rows, start : self.slot].clone()
        self.mask[:rows] = False
        self.slot = longest
        self.mask[:rows, :longest] = mask
