"""Rows laid end to end, without their padding, and attention that keeps them apart.

    rows = PackedRows(attention_mask)                              # (B, S), N of its tokens real
    inputs = {"input_ids": rows.packed(sequences), "position_ids": rows.packed(position_ids)}
    hidden = trunk(**inputs, **rows.arguments(BY_ROW))
    by_token = rows.padded(hidden)                                 # (1, N, d) -> (B, S, d)

Position ids begin anew with each row. A kernel for rows of various lengths is told where these begin (`cu_seq_lens`,
as transformers calls it); torch's own attention is called row by row (`BY_ROW`), and computes no pair of tokens that a
padded batch would not. Source of the form: Krell et al. 2021 (Efficient Sequence Packing without Cross-contamination);
transformers, modeling_flash_attention_utils.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BY_ROW = "sdpa_by_row"
"""The name, among transformers' attention functions, of torch's own attention called row by row."""


class PackedRows:
    """Where the real tokens of a batch stand.

    Args:
        attention_mask: (B, S) int64, 1 on real tokens.
    """

    def __init__(self, attention_mask: Tensor):
        self.real = attention_mask.bool()
        self.places = self.real.flatten().nonzero().squeeze(-1)  # (N,)
        self.lengths: list[int] = self.real.sum(-1).tolist()

    def arguments(self, implementation: str) -> dict[str, Any]:
        """What attention is told of the rows, as keyword arguments of a model's forward pass.

        implementation: a name of transformers' attention functions.
        """
        filled = [length for length in self.lengths if length]
        if implementation == BY_ROW:
            return {"row_lengths": filled}
        starts = F.pad(torch.tensor(filled, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
        starts = starts.to(self.places.device, non_blocking=True)
        longest = max(filled)
        return {
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def packed(self, tensor: Tensor) -> Tensor:
        """(B, S, ...) -> (1, N, ...), the real tokens' entries, row after row."""
        return tensor.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def padded(self, tensor: Tensor) -> Tensor:
        """(1, N, ...) -> (B, S, ...), with zeros for padding."""
        whole = tensor.new_zeros(self.real.numel(), *tensor.shape[2:])
        return whole.index_copy(0, self.places, tensor.squeeze(0)).unflatten(0, self.real.shape)

    def predicted(self, response_length: int) -> tuple[Tensor, Tensor]:
        """Which of the last tokens of the rows are real, and stand behind a real one.

        Returns: (B, response_length) bool; and for each of these in turn the number, among all N, of the token before
        it, (n,) int64.
        """
        before = slice(-response_length - 1, -1)
        slots = self.real[:, -response_length:] & self.real[:, before]
        numbers = self.real.flatten().cumsum(0).view(self.real.shape) - 1
        return slots, numbers[:, before][slots]


def _attention_by_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_lengths: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **how,
) -> tuple[Tensor, None]:
    """torch's attention, (1, heads, N, d) -> (1, N, heads, d), within each of the rows alone; of a padded batch, which
    has no `row_lengths`, as transformers calls it."""
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if row_lengths is None:
        return own(module, query, key, value, attention_mask, sliding_window=sliding_window, **how)
    if how.get("position_bias") is not None:
        raise ValueError("a bias of positions belongs to padded rows")
    rows = zip(*(tensor.split(list(row_lengths), 2) for tensor in (query, key, value)), strict=True)
    outputs = []
    for parts in rows:
        mask = _window(parts[0], sliding_window)
        outputs.append(own(module, *parts, mask, sliding_window=sliding_window, **how)[0])
    return torch.cat(outputs, 1), None


def _window(query: Tensor, width: int | None) -> Tensor | None:
    """(1, 1, L, L) bool, of the tokens that each may look at, where these are not all before it."""
    length = query.shape[2]
    if width is None or length <= width:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return ones.tril().triu(1 - width)[None, None]


def _mask_by_row(*args, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **how):
    """sdpa's mask of a padded batch; none of packed rows, which transformers asks for with no mask of theirs and where
    plain causality would not do."""
    if attention_mask is None and not allow_is_causal_skip:
        return None
    own = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    return own(*args, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **how)


AttentionInterface.register(BY_ROW, _attention_by_row)
AttentionMaskInterface.register(BY_ROW, _mask_by_row)
