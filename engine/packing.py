"""Which rows go through a model together, and what makes all ranks pass equally often."""

import torch

from engine import distributed
from engine.experience import Rollout


def micro_batches(rollout: Rollout, tokens: int, equally_many: bool = False, padded: bool = True) -> list[torch.Tensor]:
    """Rows of each forward pass, (N,) int64 each; every row once, rows of similar length together.

    Args:
        tokens: the most that a pass may hold; a longer row goes alone.
        equally_many: as many passes on all ranks, which have equally many rows (and all call this): where others need
            more, this rank's largest ones are halved.
        padded: whether padding counts, as it does for models that compute for it.
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
    """Row numbers by length in runs; (longest prompt + longest response) x rows of a run is at most `tokens`, or not
    `padded` the sum of its rows' lengths."""
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
