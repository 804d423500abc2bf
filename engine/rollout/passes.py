"""The passes of decoding: by the model's own code; for single tokens also by a recording of its operations, or CUDA
graphs. Which arguments a family of models takes in a forward pass is found out by trials.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine import distributed
from engine.errors import UserError
from engine.experience import position_ids
from engine.models.attention import BY_ROW
from engine.models.reading import LANGUAGE_MODEL, model_class, read_config
from engine.rollout.cache import SLOTS, GivenSlots, SlotCache
from engine.trace import traced

DECODING = ("auto", "plain", "recorded", "graphs")


def resolved_decoding(decoding: str, on_gpu: bool) -> str:
    """This way of decoding (one of DECODING), where "auto" means graphs on GPUs and recorded passes on CPUs."""
    return decoding if decoding != "auto" else "graphs" if on_gpu else "recorded"


def passes_of(model: nn.Module, cache: SlotCache, slot_masks: bool, decoding: str) -> "Passes":
    """The passes of this way of decoding (one of DECODING); plain ones where a model cannot do with others, with a
    warning. Arguments as in Passes."""
    decoding = resolved_decoding(decoding, next(model.parameters()).is_cuda)
    kind = {"plain": Passes, "recorded": RecordedPasses, "graphs": GraphedPasses}[decoding]
    try:
        if kind is not Passes and not slot_masks:
            raise ValueError("it makes the mask of each token itself")
        return kind(model, cache, slot_masks)
    except ValueError as reason:
        plain = Passes(model, cache, slot_masks)
        plain.fall_back(decoding, reason)
        return plain


ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers that keep keys and values


def check_attention(path: str, what: str, trust_remote_code: bool = False) -> None:
    """Raise UserError, naming `what` (a flag), if the language model at `path` keeps a state where others keep keys and
    values: the decoding loop has rows come and go, and a state cannot be cut out of its batch."""
    config = read_config(path, what, trust_remote_code)
    family = model_class(config, LANGUAGE_MODEL, path, what, trust_remote_code)
    other = set(getattr(config.get_text_config(), "layer_types", None) or []) - ATTENTION
    if other or getattr(family, "_is_stateful", False):
        raise UserError(
            f"{what}: {path} is a {config.model_type} model, some layers of which keep a state in place of "
            "keys and values. Responses cannot be drawn from such models here. Give one of attention "
            "alone."
        )


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model takes positions; some families take them from the mask."""
    return "position_ids" in inspect.signature(model.forward).parameters


def takes_slot_masks(model: PreTrainedModel) -> bool:
    """Whether a model understands, for a single token, a ready-made mask (B, 1, 1, slots) of booleans.

    Then Hugging Face's own mask, which is built anew for each token and asks the device for its content, is saved.
    Found out by asking: the same token behind two prompts of different lengths, with either mask. Models of which some
    layers see a part of the slots only are left out, as so few slots would not show it, and attention other than
    torch's own (sdpa), as some adds what it is given to the scores, which a small model would hardly show.
    """
    config = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", BY_ROW):
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None) is not None:
        return False
    device = next(model.parameters()).device
    ids = (torch.arange(8, device=device).view(2, 4) * 7919) % config.vocab_size
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], device=device)
    positions = position_ids(mask)
    named = [{"position_ids": part} if takes_positions(model) else {} for part in (positions[:, :3], positions[:, 3:])]

    def ask(last_mask: Tensor) -> Tensor:
        cache = SlotCache()
        cache.reserve(2, 4)
        cache.window.put(slice(0, 2), 0, 0)
        model(input_ids=ids[:, :3], attention_mask=mask[:, :3], past_key_values=cache, use_cache=True, **named[0])
        cache.window.put(slice(0, 2), 0, 3)
        return model(
            input_ids=ids[:, 3:], attention_mask=last_mask, past_key_values=cache, use_cache=True, **named[1]
        ).logits

    usual = ask(mask)
    try:
        ready = ask(mask.bool()[:, None, None])
    except Exception:  # whatever a family that expects two dimensions trips over
        return False
    return ready.shape == usual.shape and torch.allclose(ready, usual, rtol=1e-3, atol=1e-3)


FEWEST_ROWS = 8  # a pass over fewer takes a GPU as long: it reads the same weights


class Passes:
    """The model's own forward passes.

    Attributes:
        decoding: what reads single tokens, one of DECODING but "auto".
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
        """A pass without effects, made because other ranks' passes wait for this rank's."""
        self.model(input_ids=ids, use_cache=False)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        named = {"position_ids": positions} if self.takes_positions else {}
        return self.model(
            input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **named
        ).logits[:, -1]


# Code that looks at shapes alone which are the same for all single tokens: whether there is one token (transformers'
# attention), whether an embedding has a row for its padding token (torch).
LOOK_AT_SHAPES = ("sdpa_attention.py", "models/packed_rows.py", "torch/nn/functional.py")


class RecordedPasses(Passes):
    """Replays the operations of one recorded pass over single tokens, without the model's Python code between them.

    In a small model that code takes longer than the operations do. The recording is torch.jit.trace's, which torch
    would like to see replaced by compilers, but these take minutes where it takes part of a second. It holds for any
    number of rows and slots; that it does is checked when it is made, and ValueError raised for a model that it cannot
    be made of. It computes with the model's parameters as they are when it is replayed.
    """

    decoding = "recorded"

    def __init__(self, model: nn.Module, cache: SlotCache, slot_masks: bool):
        super().__init__(model, cache, slot_masks)
        self._replay = _record(_TokenStep(model), _trial_inputs(model))

    @traced("token")
    def tokens(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int, slot: int) -> Tensor:
        """As Passes.tokens."""
        rows, slots = slice(0, len(ids)), slice(start, slot + 1)
        return self._replay(ids, positions, mask[rows, None, None, slots], self.cache.parts(rows, slots))


class _TokenStep(nn.Module):
    """One pass over single tokens as a function of tensors: tokens and positions (B, 1), mask (B, 1, 1, slots), and of
    each layer in turn keys and values (B, heads, slots, d), of which the last slot is written."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.takes_positions = model, takes_positions(model)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        named = {"position_ids": positions} if self.takes_positions else {}
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=GivenSlots(parts),
            use_cache=True,
            logits_to_keep=1,
            **named,
        ).logits[:, -1]


def _record(step: _TokenStep, trials: list[tuple]) -> Callable[..., Tensor]:
    """The recording of the first trial, which gives the other trials' results too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            replay = torch.jit.trace(step, trials[0], check_trace=False)
        except Exception as error:  # whatever a family's code trips over
            raise ValueError(next(iter(str(error).splitlines()), type(error).__name__)) from error
    for warning in caught:
        # Code that looks at a tensor goes one way when recorded, and might go another later.
        if issubclass(warning.category, torch.jit.TracerWarning) and not warning.filename.endswith(LOOK_AT_SHAPES):
            raise ValueError(f"{warning.filename}:{warning.lineno} looks at what is computed")
    tolerance = torch.finfo(trials[0][3][0].dtype).eps ** 0.5
    for ids, positions, mask, parts in trials:
        again = tuple(part.clone() for part in parts)
        expected = (step(ids, positions, mask, parts), *parts)
        try:
            found = (replay(ids, positions, mask, again), *again)
        except RuntimeError as error:
            raise ValueError("its recording fails for other numbers of rows or slots") from error
        if any(
            a.shape != b.shape or not torch.allclose(a, b, rtol=tolerance, atol=tolerance)
            for a, b in zip(found, expected)
        ):
            raise ValueError("its recording computes something else")
    return replay


def _trial_inputs(model: PreTrainedModel) -> list[tuple]:
    """Arguments of `_TokenStep` for several numbers of rows and slots, with padding: 4 prompts of 6 tokens are read,
    and one more token."""
    device, rows, width = next(model.parameters()).device, 4, 6
    vocabulary = model.config.get_text_config().vocab_size
    cache = SlotCache()
    cache.reserve(rows, width + 1)
    ids = (torch.arange(rows * (width + 1), device=device).view(rows, -1) * 7919) % vocabulary
    mask = torch.arange(width + 1, device=device) >= torch.arange(rows, device=device).unsqueeze(1)
    Passes(model, cache, True).prompts(ids[:, :width], mask[:, :width].long(), 0, width)
    positions = position_ids(mask.long())[:, -1:]
    return [
        (
            ids[:count, -1:],
            positions[:count],
            mask[:count, None, None, start:],
            tuple(part.clone() for part in cache.parts(slice(0, count), slice(start, width + 1))),
        )
        for count, start in ((2, 1), (1, 0), (4, 3), (3, 0))
    ]


SLOT_SHAPES = 4  # in how many numbers of slots passes occur: quarters of the cache's room

# Has a step's operations run once and returns what runs them again, on the same tensors, and gives the same output.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class GraphedPasses(Passes):
    """Launches the operations of a pass over single tokens as one graph, without Python or launches between them.

    A graph is captured, in seconds and without a compiler, for each number of rows (halves of the cache's rows) and of
    slots (quarters of its slots) that occurs. What it gives is compared with the model's own pass when it is captured.
    Where a capture fails, or gives something else, the model's own code reads tokens from then on, with a warning that
    says why. Graphs are made anew where weights or the cache have moved.

    Raises: ValueError for a model that is not on a GPU, unless another capture is given.
    """

    sees_all_slots, decoding = True, "graphs"

    def __init__(self, model: nn.Module, cache: SlotCache, slot_masks: bool, capture: Capture | None = None):
        super().__init__(model, cache, slot_masks)
        if capture is None and not next(model.parameters()).is_cuda:
            raise ValueError("it is not on a GPU")
        self._new_capture: Callable[[], Capture] = _CudaCapture if capture is None else lambda: capture
        self._graphs: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._places: list[tuple[int, torch.Size]] = []

    @traced("prompts")
    def prompts(self, ids: Tensor, mask: Tensor, first_row: int, end: int) -> Tensor:
        """As Passes.prompts."""
        logits = super().prompts(ids, mask, first_row, end)
        places = [(each.data_ptr(), each.shape) for each in (*self.model.parameters(), *self.cache.tensors())]
        if places != self._places:
            self._graphs.clear()
            self._places, self._capture = places, self._new_capture()
            self._inputs = _Inputs(self.cache.tensors()[0])
        return logits

    @traced("token")
    def tokens(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int, slot: int) -> Tensor:
        """As Passes.tokens; the rows of the cache that are free compute too, and nobody looks. What is returned is
        written over by the next pass."""
        if self.fallback:
            return super().tokens(ids, positions, mask, start, slot)
        room = self.cache.room
        shape = rows_of_shape(len(ids), room.rows), _slots_of_shape(slot + 1, room.slots)
        self._inputs.put(ids, positions, mask, slot)
        if shape not in self._graphs:
            expected = super().tokens(ids, positions, mask, start, slot)
            try:
                self._graphs[shape] = self._checked(*shape, expected)
            except Exception as reason:  # whatever a family's code, or the driver, trips over
                self._graphs.clear()
                self.fall_back("graphs", reason)
                return expected
        return self._graphs[shape]()[: len(ids)]

    def _checked(self, rows: int, slots: int, expected: Tensor) -> Callable[[], Tensor]:
        """A graph of this shape, which gives what is expected of the inputs as they stand: of each row of logits, but
        for so much of its norm as rounding explains. Number by number bf16 is farther apart where logits are wide."""
        inputs = self._inputs

        def step() -> Tensor:
            self.cache.window.put_at(slice(0, rows), inputs.at, slots)
            with _one_token_attention(self.model):
                return self._forward(inputs.ids[:rows], inputs.mask[:rows, None, None, :slots], inputs.positions[:rows])

        with _NoQuestions():  # which end a capture in the middle, and torch's allocator does not get over that
            step()
        replay = self._capture(step)
        found, wanted = replay()[: len(expected)].float(), expected.float()
        tolerance = torch.finfo(inputs.mask.dtype).eps ** 0.5
        spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
        if not ((found - wanted).norm(dim=-1) <= tolerance * spread).all():
            raise ValueError("its graph computes something else")
        return replay


class _Inputs:
    """What graphs read, in places that stay: ids and positions (rows, 1) int64, the slot to write (1,) int64, and mask
    (rows, slots): 0 on what a row sees and -inf elsewhere, which is what torch's attention would make of booleans in
    each layer anew.

    keys: (rows, heads, slots, d) of the cache.
    """

    def __init__(self, keys: Tensor):
        rows, _, slots, _ = keys.shape
        self.ids, self.positions = torch.zeros(2, rows, 1, dtype=torch.int64, device=keys.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=keys.device)
        self.mask = keys.new_zeros(rows, slots)
        self._seen, self._hidden = keys.new_zeros(()), keys.new_full((), -torch.inf)

    def put(self, ids: Tensor, positions: Tensor, mask: Tensor, slot: int) -> None:
        """mask: (B, slots) of booleans, this slot included, for the first B rows. Those behind see everything: what a
        row gives that sees nothing is NaN, and stays in the cache."""
        self.ids[: len(ids)] = ids
        self.positions[: len(ids)] = positions
        torch.where(mask, self._seen, self._hidden, out=self.mask[: len(mask)])
        if len(mask) < len(self.mask):
            self.mask[len(mask) :] = 0.0
        self.at.fill_(slot)


ONE_TOKEN = "sdpa_of_one_token"
"""The name, among transformers' attention functions, of torch's own attention of one token a row."""


def _attention_of_one_token(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **how
) -> tuple[Tensor, None]:
    """(B, heads, 1, d) -> (B, 1, heads, d). Heads that share keys and values read them where they stand: transformers
    before 5.23 copies them for each head, in each layer (`repeat_kv`)."""
    if how.get("position_bias") is not None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **how)
    rows, heads, _, width = query.shape
    together = query.reshape(rows, key.shape[1], -1, width)
    found = F.scaled_dot_product_attention(together, key, value, attention_mask, scale=how.get("scaling"))
    return found.reshape(rows, 1, heads, -1), None


AttentionInterface.register(ONE_TOKEN, _attention_of_one_token)


@contextlib.contextmanager
def _one_token_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model's attention is that of one token a row meanwhile."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = ONE_TOKEN
    try:
        yield
    finally:
        config._attn_implementation = before


class _NoQuestions(TorchDispatchMode):
    """Within this context ValueError is raised where this thread asks the device for what is computed there.
    torch.cuda.set_sync_debug_mode would see more, and raise in other threads too: reward functions run beside."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten, name = torch.ops.aten, func.overloadpacket
        if name in (aten.index, aten.index_put, aten.index_put_):
            asks = any(each is not None and each.dtype is torch.bool for each in args[1])
        else:
            tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
            asks = name is aten.is_nonzero or not tags.isdisjoint(func.tags)
        if asks:
            raise ValueError(f"its code asks the device, by {name.__name__}")
        return func(*args, **(kwargs or {}))


class _CudaCapture:
    """Captures with torch.cuda.graph; all graphs share one pool of memory, as one of them runs at a time.

    One for each set of graphs: torch refuses a pool whose graphs are gone while a tensor in it lives, as the latest
    logits do. All on one stream: what cuBLAS keeps of memory for a stream then comes to be before a capture, and not in
    the pool.
    """

    def __init__(self):
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        here, beside = torch.cuda.current_stream(), self._stream
        beside.wait_stream(here)
        try:
            with torch.cuda.stream(beside):
                for _ in range(2):  # libraries set themselves up in the first runs, which no graph may hold
                    step()
        finally:
            here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, as NCCL's watchdog asking for its events, does not spoil the capture; and
        # torch.cuda.graph goes back to this stream only where the capture ends well.
        with torch.cuda.stream(here), torch.cuda.graph(graph, self._pool, beside, "thread_local"):
            output = step()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def rows_of_shape(living: int, rows: int) -> int:
    """The least of rows, rows / 2, rows / 4 ... (rounded up), down to FEWEST_ROWS, that has room for the living ones:
    for passes whose shapes are to be few."""
    while rows >= 2 * max(living, FEWEST_ROWS):
        rows = -(-rows // 2)
    return rows


def _slots_of_shape(slots: int, most: int) -> int:
    """The least number that occurs and is not below `slots`: a quarter of the most, in multiples of SLOTS, or more."""
    part = -(-most // (SLOT_SHAPES * SLOTS)) * SLOTS
    return min(most, -(-slots // part) * part)
