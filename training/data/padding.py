"""Lists of token ids of unequal lengths as one tensor."""

import torch
from torch import Tensor


def padded(token_lists: list[list[int]], pad_id: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """(ids, attention mask), both (B, longest) int64; padded on the right, or on the left.

    The mask comes from the lengths and not from the ids, for pad may be a real token.
    """
    width = max(map(len, token_lists))
    ids = torch.full((len(token_lists), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, token_ids in enumerate(token_lists):
        place = slice(width - len(token_ids), width) if left else slice(len(token_ids))
        ids[row, place] = torch.tensor(token_ids)
        mask[row, place] = 1
    return ids, mask
