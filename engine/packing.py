"""Which rows go through a model together, and how all ranks get equally many passes."""

import torch

from engine import distributed
from engine.experience import Rollout


def micro_batches(rollout: Rollout, tokens: int, equally_many: bool = False, padded: bool = True) -> list[torch.Tensor]:
    """The rows of each forward pass, (N,) int64 each. Every row comes once, and rows of similar length go together.

    Args:
        tokens: the most tokens of a pass; a longer row goes alone.
        equally_many: whether all ranks get equally many passes. All ranks then call this with equally many rows; if
            other ranks need more passes, this rank's largest passes are halved.
        padded: whether padding counts as tokens, because the model computes it too.
    """
    lengths = rollout.attention_mask[:, : rollout.prompt_length].sum(-1), rollout.response_mask.sum(-1)
    prompt, response = torch.stack(lengths).tolist()
    pieces = pack(prompt, response, tokens, padded)
    count = distributed.largest(len(pieces)) if equally_many else len(pieces)
    while len(pieces) < count:
        largest = max(range(len(pieces)), key=lambda index: len(pieces[index]))
        piece = pieces[largest]
        assert len(piece) > 1, f"{len(prompt)} rows cannot be dealt to {count} passes: another rank has more rows"
        pieces[largest : largest + 1] = [piece[: len(piece) // 2], piece[len(piece) // 2 :]]
    rows = torch.tensor([row for piece in pieces for row in piece], device=rollout.sequences.device)
    return list(rows.split([len(piece) for piece in pieces]))


def pack(prompt_lengths: list[int], response_lengths: list[int], tokens: int, padded: bool = True) -> list[list[int]]:
    """Row numbers sorted by length and cut into runs. In a run (longest prompt + longest response) x rows is at most
    `tokens`; if not `padded`, the sum of the rows' lengths is."""
    order = sorted(range(len(prompt_lengths)), key=lambda row: prompt_lengths[row] + response_lengths[row])
    pieces: list[list[int]] = []
    longest, real = (0, 0), 0
    for row in order:
        widened = max(longest[0], prompt_lengths[row]), max(longest[1], response_lengths[row])
        real += prompt_lengths[row] + response_lengths[row]
        if pieces and (sum(widened) * (len(pieces[-1]) + 1) if padded else real) <= tokens:
            pieces[-1].append(row)
            longest = widened
        else:
            pieces.append([row])
            longest = prompt_lengths[row], response_lengths[row]
            real = sum(longest)
    return pieces
