"""Sequence parallelism: the ranks of a group compute the rows of all of them together, each an equal slice of the
tokens.

    rows = SplitRows(attention_mask, group)                        # this rank's rows, which may be none
    inputs = {"input_ids": rows.packed(sequences), "position_ids": rows.packed(position_ids)}
    hidden = trunk(**inputs, **rows.arguments(BY_ROW))             # (1, n, d), of this rank's slice
    by_token = rows.padded(hidden)                                 # (B, S, d), of this rank's rows

The packed rows of all ranks stand end to end, in the order of the ranks, and are cut into slices of n tokens. All parts
of a model but attention compute each token for itself, so they compute a slice as it is. Attention exchanges tokens for
heads: each rank gets all tokens of some heads, computes them row by row, and gives the results back. Nobody needs a
mask, and rows may have any length. Each rank keeps its own rows: data, losses and ZeRO are as without groups.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses". DeepSpeed's implementation is not used: it drops attention masks, and
replaces attention in the whole process with the head counts of one model.
"""

from itertools import accumulate, chain
from math import gcd
from typing import Any

import torch
from torch import Tensor

from engine.distributed import RankGroup
from engine.models.attention import PackedRows


class SplitRows(PackedRows):
    """The packed rows of all ranks of a group, of which this rank computes a slice (all ranks of the group create it,
    and call its methods, together). If the slices are longer than the rows, a row of zeros fills the last ones.

    Args:
        attention_mask: (B, S) int64, of the rows that this rank brings, which may be none.
    """

    def __init__(self, attention_mask: Tensor, group: RankGroup):
        super().__init__(attention_mask)
        self.group = group
        everyone = group.all_objects(self.lengths)
        # Where each rank's rows begin among all tokens, and where the last ones end.
        starts = [*accumulate(map(sum, everyone), initial=0)]
        self.width = max(1, -(-starts[-1] // group.size))  # if no rank has a row, all compute a row of zeros
        self.lengths = [*chain(*everyone), self.width * group.size - starts[-1]]

        def common(owner: int, slice_of: int) -> int:
            """How many tokens of one rank's rows another rank computes."""
            first, last = slice_of * self.width, (slice_of + 1) * self.width
            return max(0, min(starts[owner + 1], last) - max(starts[owner], first))

        ranks = range(group.size)
        self.given = [common(group.place, rank) for rank in ranks]
        self.taken = [common(rank, group.place) for rank in ranks]

    def arguments(self, implementation: str) -> dict[str, Any]:
        """As in PackedRows, for the rows of all ranks, with the exchanges that attention makes."""
        return super().arguments(implementation) | {"split": self}

    def packed(self, tensor: Tensor) -> Tensor:
        """(B, S, ...), of this rank's rows -> (1, n, ...): the entries of the tokens of this rank's slice."""
        slice_ = self.group.all_to_all(super().packed(tensor)[0], self.given, self.taken)
        filling = slice_.new_zeros(self.width - len(slice_), *slice_.shape[1:])
        return torch.cat([slice_, filling]).unsqueeze(0)

    def padded(self, tensor: Tensor) -> Tensor:
        """(1, n, ...), of this rank's slice -> (B, S, ...): the entries at the positions of the real tokens of this
        rank's rows, with zeros at padding."""
        own = self.group.all_to_all(tensor[0, : sum(self.taken)], self.taken, self.given)
        return super().padded(own.unsqueeze(0))

    def heads_for_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of all heads of this rank's slice, (1, H, n, d) each -> some heads of all tokens,
        (1, H / ranks, ranks * n, d) each, by one exchange. Heads that the ranks cannot share are repeated first."""
        ranks = self.group.size
        parts = []
        for tensor in tensors:
            repeated = tensor[0].repeat_interleave(ranks // gcd(ranks, tensor.shape[1]), 0)
            parts.append(repeated.unflatten(0, (ranks, -1)).flatten(1))
        arrived = self._among_ranks(torch.cat(parts, 1)).split([part.shape[1] for part in parts], 1)
        shapes = [(ranks, -1, self.width, tensor.shape[3]) for tensor in tensors]
        return tuple(
            part.reshape(shape).transpose(0, 1).flatten(1, 2).unsqueeze(0) for part, shape in zip(arrived, shapes)
        )

    def tokens_for_heads(self, tensor: Tensor) -> Tensor:
        """Some heads of all tokens, (1, ranks * n, H / ranks, d) -> all heads of this rank's slice, (1, n, H, d)."""
        by_slice = tensor[0].unflatten(0, (self.group.size, -1))
        return self._among_ranks(by_slice).transpose(0, 1).flatten(1, 2).unsqueeze(0).contiguous()

    def _among_ranks(self, tensor: Tensor) -> Tensor:
        """(ranks, ...) -> (ranks, ...): entry r goes to rank r, and the result's entry r comes from rank r."""
        each = [1] * self.group.size
        return self.group.all_to_all(tensor, each, each)
