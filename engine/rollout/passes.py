"""The forward passes of decoding. Prompts are read by the model's own code. Single tokens are read by the model's own
code, by replaying a recording of its operations, or by launching CUDA graphs of them. Small trials find out which
arguments a model family takes.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine import distributed
from engine.experience import position_ids
from engine.models.attention import BY_ROW, keeps_states
from engine.models.config_and_tokenizer import head_sizes
from engine.models.policy import Backbone
from engine.models.tensor_parallel import bare_model
from engine.rollout.cache import SLOTS, GivenSlots, SlotCache
from engine.trace import traced

DECODING = ("auto", "plain", "recorded", "graphs")


def resolved_decoding(decoding: str, on_gpu: bool) -> str:
    """`decoding` (one of DECODING), with "auto" replaced: by "graphs" on GPUs, by "recorded" on CPUs."""
    return decoding if decoding != "auto" else "graphs" if on_gpu else "recorded"


def make_passes(model: nn.Module, cache: SlotCache, slot_masks: bool, decoding: str) -> "Passes":
    """The passes that `decoding` (one of DECODING) names. If the model does not support them, this function warns and
    returns plain passes. Other arguments: as in Passes."""
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


def windows_of(model: PreTrainedModel) -> dict[str, int | None]:
    """{kind of layer: how many of the latest slots a token attends to in such layers; None for all slots}. A model
    without a list of kinds has one kind."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or None  # some families write 0 for none
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}


def takes_slot_masks(model: PreTrainedModel) -> bool:
    """Whether the model, when it reads single tokens, accepts complete attention masks (`Passes.masks`).

    If transformers gets a complete mask, it builds no mask of its own for each token. Building one makes the host wait
    for the device. A trial decides. The model reads one token after two prompts of different lengths, once with each
    kind of mask, and the logits are compared. If layers attend to a window of slots, the window is 2 slots in the
    trial, so that few slots show a difference. Two kinds of models get False without a trial: models with other layers
    (Llama 4's attend to chunks of a row), and models whose attention is neither torch's own (sdpa) nor one that gets
    its masks from transformers and adds them to scores (eager).
    """
    config, kinds = model.config.get_text_config(), windows_of(model)
    adds = config._attn_implementation == "eager" and getattr(model, "_supports_attention_backend", False)
    other = kinds.keys() - {"full_attention", "sliding_attention"}
    if other or not (adds or config._attn_implementation in ("sdpa", BY_ROW)):
        return False
    device = next(model.parameters()).device
    ids = (torch.arange(8, device=device).view(2, 4) * 7919) % config.vocab_size
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], device=device)

    def ask(slot_masks: bool) -> Tensor:
        cache = SlotCache()
        cache.reserve(2, 4)
        passes = Passes(model, cache, slot_masks)
        passes.prompts(ids[:, :3], mask[:, :3], 0, 3)
        return passes.tokens(ids[:, 3:], position_ids(mask)[:, 3:], mask.bool(), 0, 3)

    with _configured(model, "sliding_window", 2) if any(kinds.values()) else contextlib.nullcontext():
        usual = ask(False)
        try:
            ready = ask(True)
        except Exception:  # a model family that expects a two-dimensional mask may raise anything
            return False
    return ready.shape == usual.shape and _alike(ready, usual, 1e-3)


def _alike(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether in each row of the logits (B, V) the norm of the differences is at most this part of the norm of the
    expected logits' deviations from their mean.

    Rounding may cause such differences. Single logits are not compared, because in bf16 large logits are rounded more.
    """
    found, expected = found.float(), expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return bool(((found - expected).norm(dim=-1) <= tolerance * spread).all())


READ_AT_ONCE = 8192  # tokens of a long prompt that one pass reads
FEWEST_ROWS = 8  # with fewer rows a GPU pass takes as long, since it reads the same weights


class Passes:
    """Forward passes by the model's own code.

    Attributes:
        decoding: how single tokens are read: one of DECODING, but not "auto".
        fallback: the reason why the model's own code reads single tokens although another way was asked for; otherwise
        "".

    Args:
        model: a causal language model in eval mode.
        cache: the cache that holds the keys and values of all tokens that were read.
        slot_masks: whether the model accepts complete attention masks for single tokens (`takes_slot_masks`).
    """

    sees_all_slots = False  # whether passes compute on all slots of the cache, also on those that no row uses
    decoding, fallback = "plain", ""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, slot_masks: bool):
        self.model = model
        self.cache = cache
        self.slot_masks = slot_masks
        self.windows = windows_of(model)
        # Model families without this argument compute positions from the attention mask.
        taken = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in taken
        self.cache_name = "cache_params" if "cache_params" in taken else "past_key_values"  # the former in Mamba's

    @traced("prompts")
    def prompts(self, ids: Tensor, mask: Tensor, first_row: int, end: int) -> Tensor:
        """Read left-padded prompts. Row i of `ids` goes into row first_row + i of the cache, and the last token of each
        prompt into slot end - 1. If there is a long prompt, several passes read the pieces of `prompt_pieces`.

        Args:
            ids, mask: (B, N) int64, the prompts and their attention mask.

        Returns: (B, V), the logits of each row's next token.
        """
        width = ids.shape[1]
        if width <= READ_AT_ONCE:
            self.cache.window.put(slice(first_row, first_row + len(ids)), end - width, end - width)
            return self._forward(ids, mask.long(), position_ids(mask))
        positions, last = position_ids(mask), {}
        for row, start, begin, behind in self.prompt_pieces(mask.sum(-1).tolist(), width):
            rows, seen = slice(first_row + row, first_row + row + 1), mask[row : row + 1, start:behind].long()
            self.cache.window.put(rows, end - width + start, end - width + begin)
            piece = slice(row, row + 1), slice(begin, behind)
            last[row] = self._forward(ids[piece], seen, positions[piece])
        return torch.cat(list(last.values()))

    def prompt_pieces(self, lengths: Sequence[int], width: int) -> list[tuple[int, int, int, int]]:
        """The passes that read prompts: (row, start, begin, behind) for each, if a prompt has more than READ_AT_ONCE
        tokens. The prompt begins at position `start` of its row; the pass reads the positions from `begin` to before
        `behind`. A pass then has one row, no padding, and at most READ_AT_ONCE tokens, so that its memory does not grow
        with rows and lengths. Models that keep states read a prompt in one pass.

        lengths: the tokens of each prompt. width: the number of positions of each row.
        """
        step = width if keeps_states(self.model.config) else READ_AT_ONCE
        return [
            (row, width - length, begin, min(begin + step, width))
            for row, length in enumerate(lengths)
            for begin in range(width - length, width, step)
        ]

    def prompt_passes(self, lengths: Sequence[int]) -> int:
        """The number of forward passes in which `prompts` reads prompts of these lengths, longest first."""
        if not lengths or lengths[0] <= READ_AT_ONCE:
            return min(len(lengths), 1)
        return len(self.prompt_pieces(lengths, lengths[0]))

    @traced("token")
    def tokens(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int, slot: int) -> Tensor:
        """Read one token of each of the first B rows of the cache into slot `slot`.

        Args:
            ids, positions: (B, 1) int64, the tokens and their position ids.
            mask: (rows, slots) bool, the slots that each row attends to, `slot` included. No row has a token before
                slot `start`.

        Returns: (B, V), the logits of each row's next token.
        """
        self.cache.window.put(slice(0, len(ids)), start, slot)
        seen = mask[: len(ids), start : slot + 1]
        if self.slot_masks:
            return self._forward(ids, self.masks(seen, slot - start), positions)
        # Layers without keys and values have no slots to mask. Mamba's would multiply the token by the whole mask.
        return self._forward(ids, seen.long() if self.cache.tensors() else None, positions)

    def masks(self, mask: Tensor, slot: int) -> dict[str, Tensor]:
        """The complete attention masks of tokens in slot `slot`: {kind of layer: (B, 1, 1, slots) in the dtype of the
        keys, 0 where the token attends and -inf elsewhere}.

        All tokens are in the same slot, so a window hides the same slots of all rows. mask: (B, slots) bool, the slots
        that hold a token of the row, `slot` included.
        """
        dtype, masks = self.cache.tensors()[0].dtype, {}
        for kind, window in self.windows.items():
            seen = mask if window is None else mask & (torch.arange(mask.shape[1], device=mask.device) > slot - window)
            masks[kind] = seen[:, None, None].to(dtype).log()
        return masks

    def fall_back(self, decoding: str, reason: Exception) -> None:
        """Set `fallback`, and warn that the model's own code reads single tokens from now on. decoding: the way that
        was tried. reason: the exception with which it failed."""
        self.fallback = next(iter(str(reason).splitlines()), "") or type(reason).__name__
        warnings.warn(
            f"rank {distributed.rank()}: --decoding {decoding} does not work for {type(self.model).__name__} "
            f"({self.fallback}); single tokens are read by the model's own code",
            stacklevel=3,
        )

    def for_nothing(self, ids: Tensor) -> None:
        """A forward pass whose result is not used. The passes of other ranks exchange data with this pass and would
        otherwise wait for it."""
        self.model(input_ids=ids, use_cache=False)

    def _forward(self, ids: Tensor, mask: Tensor | dict[str, Tensor] | None, positions: Tensor) -> Tensor:
        named: dict[str, object] = {self.cache_name: self.cache}
        if self.takes_positions:
            named["position_ids"] = positions
        if isinstance(mask, dict) and len(mask) == 1:
            (mask,) = mask.values()
        return self.model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **named).logits[:, -1]


def cache_bytes(module: Backbone, slots: int, rows: int) -> int:
    """The number of bytes that a model's cache takes: keys and values in `slots` slots, counted over all rows, and the
    states of `rows` rows."""
    config = module.model.config.get_text_config()
    if not keeps_states(config):
        _, kept, width = head_sizes(config)
        return 2 * config.num_hidden_layers * kept * width * slots * next(module.model.parameters()).element_size()
    # Each family has states of its own shapes. A pass over one token on the meta device shows them.
    bare, token = bare_model(module).eval(), torch.zeros(1, 1, dtype=torch.int64, device="meta")
    inner = bare.config.get_text_config()  # the plainest code runs on the meta device
    inner._attn_implementation = "eager"
    inner._experts_implementation = "batched_mm"
    cache = SlotCache()
    cache.reserve(1, SLOTS)
    cache.window.put(slice(1), 0, 0)
    exporting = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = True  # transformers then calls no kernels, which take no meta tensors
    try:
        with torch.no_grad():
            Passes(bare, cache, False)._forward(token, None, torch.zeros_like(token))
    finally:
        torch.compiler._is_exporting_flag = exporting
    slot, state = (sum(tensor.nbytes for tensor in kept) for kept in (cache.tensors(), cache.states()))
    return slot // SLOTS * slots + state * rows


# Files whose code branches on shapes. These branches are the same for all passes over single tokens: the number of
# tokens (transformers' attention), or whether an embedding has a row for its padding token (torch).
LOOK_AT_SHAPES = ("sdpa_attention.py", "torch/nn/functional.py")


class RecordedPasses(Passes):
    """Reads single tokens by replaying the recorded operations of one pass. The model's Python code, which takes longer
    than the operations themselves in a small model, does not run.

    torch.jit.trace makes the recording. Torch recommends its compilers instead, but they take minutes, and a trace
    takes less than a second. One recording serves any number of rows and slots, and reads the model's current
    parameters. After it is made, it is tested with several numbers of rows and slots.

    Raises: ValueError if the model cannot be recorded.
    """

    decoding = "recorded"

    def __init__(self, model: nn.Module, cache: SlotCache, slot_masks: bool):
        super().__init__(model, cache, slot_masks)
        self._replay = _record(_TokenStep(model), _trial_inputs(model))

    @traced("token")
    def tokens(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int, slot: int) -> Tensor:
        """As Passes.tokens."""
        rows, slots = slice(0, len(ids)), slice(start, slot + 1)
        masks = self.masks(mask[rows, slots], slot - start)
        return self._replay(ids, positions, masks, self.cache.parts(rows, slots))


class _TokenStep(nn.Module):
    """One pass over one token per row, as a function of tensors only.

    Arguments of `forward`: ids and positions (B, 1) int64, the masks of `Passes.masks`, and `parts`: for each layer the
    keys, then the values, (B, heads, slots, d). The pass writes into the last slot of `parts` and returns logits (B,
    V).
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, masks: dict[str, Tensor], parts: tuple[Tensor, ...]) -> Tensor:
        return Passes(self.model, GivenSlots(parts), True)._forward(ids, masks, positions)


def _record(step: _TokenStep, trials: list[tuple]) -> Callable[..., Tensor]:
    """A recording of the pass with the first trial's inputs. It is returned only if it gives the right results for the
    inputs of all trials.

    Raises: ValueError if the pass cannot be recorded or branches on computed numbers, or if the recording gives other
    results than the pass.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            replay = torch.jit.trace(step, trials[0], check_trace=False)
        except Exception as error:  # the code of a model family may raise anything
            raise ValueError(next(iter(str(error).splitlines()), type(error).__name__)) from error
    for warning in caught:
        # If code branches on a tensor's numbers, only the branch that ran is recorded; a later token might need the
        # other.
        if issubclass(warning.category, torch.jit.TracerWarning) and not warning.filename.endswith(LOOK_AT_SHAPES):
            raise ValueError(f"{warning.filename}:{warning.lineno} branches on computed numbers")
    tolerance = torch.finfo(trials[0][3][0].dtype).eps ** 0.5
    for ids, positions, masks, parts in trials:
        again = tuple(part.clone() for part in parts)
        expected = (step(ids, positions, masks, parts), *parts)
        try:
            found = (replay(ids, positions, masks, again), *again)
        except RuntimeError as error:
            raise ValueError("its recording fails for other numbers of rows or slots") from error
        if any(
            a.shape != b.shape or not torch.allclose(a, b, rtol=tolerance, atol=tolerance)
            for a, b in zip(found, expected)
        ):
            raise ValueError("its recording gives other results")
    return replay


def _trial_inputs(model: PreTrainedModel) -> list[tuple]:
    """Arguments of `_TokenStep` for several numbers of rows and slots, with padding. This function lets the model read
    4 prompts of 6 tokens; the arguments are for the token after them."""
    device = next(model.parameters()).device
    rows = 4
    width = 6
    vocabulary = model.config.get_text_config().vocab_size
    cache = SlotCache()
    cache.reserve(rows, width + 1)
    ids = (torch.arange(rows * (width + 1), device=device).view(rows, -1) * 7919) % vocabulary
    mask = torch.arange(width + 1, device=device) >= torch.arange(rows, device=device).unsqueeze(1)
    passes = Passes(model, cache, True)
    passes.prompts(ids[:, :width], mask[:, :width].long(), 0, width)
    positions = position_ids(mask.long())[:, -1:]
    return [
        (
            ids[:count, -1:],
            positions[:count],
            passes.masks(mask[:count, start:], width - start),
            tuple(part.clone() for part in cache.parts(slice(0, count), slice(start, width + 1))),
        )
        for count, start in ((2, 1), (1, 0), (4, 3), (3, 0))
    ]


SLOT_SHAPES = 4  # graphs exist for this many different numbers of slots: quarters of the cache's slots

# A function that runs a step once and returns another function. That function runs the operations of the step again, on
# the same tensors, and returns the same output tensor.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class GraphedPasses(Passes):
    """Reads single tokens by launching all operations of a pass as one graph.

    Graphs exist for few shapes: for all, half, a quarter ... of the cache's rows, and for quarters of its slots. A
    graph is captured when its shape first occurs; this takes seconds and needs no compiler. The graph's logits are
    compared with those of the model's own pass. If the capture fails or the logits differ, a warning says why, and the
    model's own code reads single tokens from then on. If weights or the cache have moved in memory, all graphs are
    captured again.

    Raises: ValueError for a model that is not on a GPU, unless `capture` is given.
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
            self._inputs = _Inputs(self.cache.tensors()[0], self.windows)
        return logits

    @traced("token")
    def tokens(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int, slot: int) -> Tensor:
        """As Passes.tokens. The graph also computes free rows of the cache; their results are not used. The next pass
        overwrites the returned logits."""
        if self.fallback:
            return super().tokens(ids, positions, mask, start, slot)
        room = self.cache.room
        shape = rows_of_shape(len(ids), room.rows), _slots_of_shape(slot + 1, room.slots)
        self._inputs.put(ids, positions, self.masks(mask, slot), slot)
        if shape not in self._graphs:
            expected = super().tokens(ids, positions, mask, start, slot)
            try:
                self._graphs[shape] = self._checked(*shape, expected)
            except Exception as reason:  # the code of a model family, or the driver, may raise anything
                self._graphs.clear()
                self.fall_back("graphs", reason)
                return expected
        return self._graphs[shape]()[: len(ids)]

    def _checked(self, rows: int, slots: int, expected: Tensor) -> Callable[[], Tensor]:
        """A graph of this shape. It is returned only if its logits for the present inputs equal `expected`, (B, V),
        within rounding.

        Raises: ValueError if the logits differ, or if the model's code does what no graph can hold (`_NoHostReads`).
        """
        inputs, own = self._inputs, self.model.config.get_text_config()._attn_implementation

        def step() -> Tensor:
            self.cache.window.put_at(slice(0, rows), inputs.at, slots)
            masks = {kind: mask[:rows, ..., :slots] for kind, mask in inputs.masks.items()}
            with _configured(self.model, "_attn_implementation", own if own == "eager" else ONE_TOKEN):
                return self._forward(inputs.ids[:rows], masks, inputs.positions[:rows])

        with _NoHostReads():  # such an operation would end the capture halfway, with a message that does not name it
            step()
        replay = self._capture(step)
        if not _alike(replay()[: len(expected)], expected, torch.finfo(self.cache.tensors()[0].dtype).eps ** 0.5):
            raise ValueError("its graph gives other results")
        return replay


class _Inputs:
    """The input tensors of graphs. They stay at the same place in memory.

    ids, positions: (rows, 1) int64. at: (1,) int64, the slot to write into. masks: as Passes.masks gives them, for all
    rows and slots.

    Args:
        keys: (rows, heads, slots, d), the keys of any layer in the cache. kinds: the kinds of layers.
    """

    def __init__(self, keys: Tensor, kinds: Iterable[str]):
        rows, _, slots, _ = keys.shape
        self.ids, self.positions = torch.zeros(2, rows, 1, dtype=torch.int64, device=keys.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=keys.device)
        self.masks = {kind: keys.new_zeros(rows, 1, 1, slots) for kind in kinds}

    def put(self, ids: Tensor, positions: Tensor, masks: dict[str, Tensor], slot: int) -> None:
        """Copy the inputs of the first B rows; arguments as in Passes.tokens, with masks of at least B rows.

        The rows after those attend to all slots: a row that attends to nothing would give NaN, which would stay in the
        cache.
        """
        self.ids[: len(ids)] = ids
        self.positions[: len(ids)] = positions
        for kind, mask in masks.items():
            self.masks[kind][: len(mask)] = mask
            self.masks[kind][len(mask) :] = 0.0
        self.at.fill_(slot)


ONE_TOKEN = "sdpa_of_one_token"
"""The name under which transformers' attention functions list `_attention_of_one_token`."""


def _attention_of_one_token(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **how
) -> tuple[Tensor, None]:
    """torch's attention for one token per row: query (B, heads, 1, d) -> (B, 1, heads, d).

    Heads that share keys and values (grouped-query attention) read the shared tensors in place. Transformers before
    5.23 copies keys and values for each head in each layer (`repeat_kv`).
    """
    if how.get("position_bias") is not None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **how)
    rows, heads, _, width = query.shape
    together = query.reshape(rows, key.shape[1], -1, width)
    found = F.scaled_dot_product_attention(together, key, value, attention_mask, scale=how.get("scaling"))
    return found.reshape(rows, 1, heads, -1), None


AttentionInterface.register(ONE_TOKEN, _attention_of_one_token)


@contextlib.contextmanager
def _configured(model: PreTrainedModel, name: str, value: int | str) -> Iterator[None]:
    """Within this context this field of the model's configuration has this value."""
    config = model.config.get_text_config()
    before = getattr(config, name)
    setattr(config, name, value)
    try:
        yield
    finally:
        setattr(config, name, before)


class _NoHostReads(TorchDispatchMode):
    """Within this context, an operation that copies numbers between the host and the device raises ValueError, if this
    thread calls it. No graph can hold such an operation.

    torch.cuda.set_sync_debug_mode finds more such operations, but it also raises in other threads, in which reward
    functions run.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        name = func.overloadpacket
        kwargs = kwargs or {}
        with self:  # in inference mode, an operation that consists of others arrives before these
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if name in (aten.index, aten.index_put, aten.index_put_):
            asks = any(each is not None and each.dtype is torch.bool for each in args[1])
        else:
            asks = not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)
        if asks:
            raise ValueError(f"its code reads computed numbers on the host, by {name.__name__}")
        copies = name in (aten._to_copy, aten.copy_)  # other operations get the host's single numbers as arguments
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor) and (copies or each.dim())]
        on_host = {each.is_cpu for each in tensors}
        if name is aten._to_copy:
            on_host.add(torch.device(kwargs.get("device") or args[0].device).type == "cpu")
        elif name is aten.lift_fresh:  # torch.tensor has just copied these numbers from a list
            on_host.add(True)
        if len(on_host) == 2:
            raise ValueError(f"its code copies between the host and the device, by {name.__name__}")
        return func(*args, **kwargs)


class _CudaCapture:
    """Captures graphs with torch.cuda.graph. All graphs of one object share one memory pool, since only one of them
    runs at a time.

    When graphs are captured again, a new object is needed: torch refuses a pool for further graphs if all its graphs
    are gone while a tensor in the pool, such as the latest logits, is still used. All captures use one stream, so that
    cuBLAS allocates its workspace for the stream before the first capture, outside of the pool.
    """

    def __init__(self):
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        here, beside = torch.cuda.current_stream(), self._stream
        beside.wait_stream(here)
        try:
            with torch.cuda.stream(beside):
                for _ in range(2):  # libraries initialise themselves in their first runs, which must not be captured
                    step()
        finally:
            here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:
            # With "thread_local", calls of other threads, such as NCCL's watchdog querying events, do not break the
            # capture. The outer context restores the current stream; torch.cuda.graph restores it only if the capture
            # succeeds.
            with torch.cuda.stream(here), torch.cuda.graph(graph, self._pool, beside, "thread_local"):
                output = step()
        except Exception:
            # Before torch 2.12 the allocator does not notice that a failed capture has ended, and can then free nothing
            # (pytorch #180395). Later versions refuse this call, since it is done.
            with contextlib.suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(beside.device_index, self._pool)
            raise

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def rows_of_shape(living: int, rows: int) -> int:
    """The number of rows that a graph computes: the smallest of rows, rows / 2, rows / 4 ... (rounded up, at least
    FEWEST_ROWS) that is not below `living`, the number of rows in use. Few different numbers of rows mean few
    graphs."""
    while rows >= 2 * max(living, FEWEST_ROWS):
        rows = -(-rows // 2)
    return rows


def _slots_of_shape(slots: int, most: int) -> int:
    """The number of slots that a graph computes: the smallest of one to four quarters of `most` (a quarter is rounded
    up to a multiple of SLOTS) that is not below `slots`."""
    part = -(-most // (SLOT_SHAPES * SLOTS)) * SLOTS
    return min(most, -(-slots // part) * part)
