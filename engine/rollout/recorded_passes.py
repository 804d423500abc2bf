"""Single tokens by a recording of the model's operations."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.experience import position_ids
from engine.rollout.cache import GivenSlots, SlotCache
from engine.rollout.families import takes_positions
from engine.rollout.passes import Passes
from engine.trace import traced

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
