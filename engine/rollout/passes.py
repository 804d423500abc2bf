"""How a model reads tokens into the cache: as it is, by a recording of its operations, or compiled."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.experience import position_ids
from engine.rollout.cache import GivenSlots, SlotCache
from engine.rollout.families import takes_positions
from engine.trace import traced

DECODING = ("auto", "plain", "recorded", "compiled")
# Code that looks at shapes alone which are the same for all single tokens: whether there is one token (transformers'
# attention), whether an embedding has a row for its padding token (torch).
LOOK_AT_SHAPES = ("sdpa_attention.py", "torch/nn/functional.py")


class Passes:
    """The model's own forward passes.

    Args:
        model: a causal language model in eval mode.
        cache: where keys and values of what was read stand.
        slot_masks: whether the model takes the mask of a single token ready made (`takes_slot_masks`).
    """

    sees_all_slots = False  # whether passes see all of the cache's room, and not only what living rows have in it

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

    def for_nothing(self, ids: Tensor) -> None:
        """A pass that leaves no trace, because other ranks' passes wait for this rank's."""
        self.model(input_ids=ids, use_cache=False)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        named = {"position_ids": positions} if self.takes_positions else {}
        return self.model(
            input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **named
        ).logits[:, -1]


class RecordedPasses(Passes):
    """Replays the operations of one recorded pass over single tokens, without the model's Python code between them.

    In a small model that code takes longer than the operations do. The recording is torch.jit.trace's, which torch
    would like to see replaced by compilers, but these take minutes where it takes part of a second. It holds for any
    number of rows and slots; that it does is checked when it is made, and ValueError raised for a model that it cannot
    be made of. It computes with the model's parameters as they are when it is replayed.
    """

    def __init__(self, model: nn.Module, cache: SlotCache, slot_masks: bool):
        super().__init__(model, cache, slot_masks)
        self._replay = _record(_TokenStep(model), _trial_inputs(model))

    @traced("token")
    def tokens(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int, slot: int) -> Tensor:
        """As Passes.tokens."""
        rows, slots = slice(0, len(ids)), slice(start, slot + 1)
        return self._replay(ids, positions, mask[rows, None, None, slots], self.cache.parts(rows, slots))


class CompiledPasses(Passes):
    """Passes of single tokens by what torch.compile makes of the model, with CUDA graphs on GPUs.

    Shapes do not change from token to token: passes see all slots, and rows in numbers that halve.
    """

    sees_all_slots = True

    def __init__(self, model: nn.Module, cache: SlotCache, slot_masks: bool):
        super().__init__(model, cache, slot_masks)

        def step(ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
            return self._forward(ids, mask[:, None, None], positions)

        # Beyond torch's own limit of 8 shapes it would give up for good; rooms may grow, and rows halve, more often.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        graphs = "reduce-overhead" if next(model.parameters()).is_cuda else "default"
        self._step = torch.compile(step, dynamic=False, mode=graphs)

    @traced("token")
    def tokens(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int, slot: int) -> Tensor:
        """As Passes.tokens; the rows of the cache that are free compute too, and nobody looks."""
        living, rows = len(ids), len(mask)
        while rows >= 2 * living:
            rows = -(-rows // 2)
        wide = torch.zeros(rows, 2, dtype=torch.int64, device=ids.device)
        wide[:living, :1], wide[:living, 1:] = ids, positions
        self.cache.window.put_at(slice(0, rows), torch.tensor([slot], device=ids.device), mask.shape[1])
        logits = self._step(wide[:, :1].contiguous(), wide[:, 1:].contiguous(), mask[:rows])
        return logits[:living].clone()  # the next pass writes over it where there are CUDA graphs


def passes_of(model: nn.Module, cache: SlotCache, slot_masks: bool, decoding: str) -> Passes:
    """The passes of this way of decoding (one of DECODING); plain ones where a model cannot do with others, with a
    warning if they were asked for by name. "auto" takes recorded ones on CPUs. Arguments as in Passes."""
    kind = {
        "plain": Passes,
        "recorded": RecordedPasses,
        "compiled": CompiledPasses,
        "auto": Passes if next(model.parameters()).is_cuda else RecordedPasses,
    }[decoding]
    try:
        if kind is not Passes and not slot_masks:
            raise ValueError("it makes the mask of each token itself")
        return kind(model, cache, slot_masks)
    except ValueError as reason:
        if decoding != "auto":
            warnings.warn(
                f"single tokens of {type(model).__name__} cannot be {decoding} ({reason}); its own code reads them",
                stacklevel=2,
            )
        return Passes(model, cache, slot_masks)


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
