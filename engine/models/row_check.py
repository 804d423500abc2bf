"""Whether a model reads a row the same alone, beside longer ones, and without padding: found out by asking."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine import distributed
from engine.errors import SharedError
from engine.experience import position_ids
from engine.models.backbone import Backbone
from engine.models.policy import Policy

SHORT, LONG = 5, 8  # tokens of the row that is asked for, and of the one beside it


@torch.no_grad()
def check_rows(module: Backbone, call: Callable[..., Tensor | tuple[Tensor, Tensor]], what: str) -> None:
    """Compare the three, unless attention is torch's own of padded rows, as it usually is (all ranks call this).

    Args:
        call: the module's forward pass, as an engine makes it.
        what: how messages name the model.

    Raises: SharedError where padding is attended to, or rows without padding are read otherwise.
    """
    packs, name = module.packs, module.model.base_model.config._attn_implementation
    if name == "sdpa" and not packs:
        return
    training = module.training
    module.eval()
    module.pack(False)
    padded = _answers(module, call, LONG)
    if not _same(module, padded[:1], _answers(module, call, SHORT)):
        raise SharedError(
            f"{what}: with --attn_implementation {name} this model attends to padding: a row has other results beside "
            "a longer one than alone. Leave it out, or give sdpa or eager."
        )
    module.pack(packs)
    if packs and not _same(module, _answers(module, call, LONG), padded):
        raise SharedError(
            f"{what}: this model reads rows without padding otherwise than padded ones. Give --packing padded."
        )
    module.train(training)


def _answers(module: Backbone, call: Callable, width: int) -> Tensor:
    """Log-probs or scores of the last tokens of a short row, and of a long one where the batch is as wide as that;
    (1 or 2, n) float32."""
    device = distributed.device()
    row = torch.arange(1, LONG + 1, device=device) * 7919 % module.model.config.get_text_config().vocab_size
    sequences = torch.stack([row, row.flip(0)] if width == LONG else [row])[:, -width:]
    mask = torch.ones_like(sequences)
    mask[0, : width - SHORT] = 0
    given = sequences, mask, position_ids(mask)
    if isinstance(module, Policy):
        return call(*given, response_length=SHORT - 1)[0]
    return call(*given)[:, -SHORT:]


def _same(module: Backbone, found: Tensor, expected: Tensor) -> bool:
    """On all ranks, within the rounding of the weights' dtype."""
    tolerance = torch.finfo(next(module.parameters()).dtype).eps ** 0.5
    near = (found - expected).abs() <= tolerance * expected.abs().max().clamp(min=1.0)
    return not distributed.any_rank(not bool(near.all()))
