"""Decides which rows go through a model together, and makes the number of passes equal on all ranks."""

from itertools import chain

import torch

from engine import distributed
from engine.distributed import ALONE, RankGroup
from engine.experience import Rollout


def micro_batches(
    rollout: Rollout, tokens: int, equally_many: bool = False, padded: bool = True, group: RankGroup = ALONE
) -> list[torch.Tensor]:
    """A list with the row numbers of each forward pass, (N,) int64. Every row is in exactly one pass, and rows of
    similar length are in the same pass.

    Args:
        tokens: the largest number of tokens in a pass. A row with more tokens is a pass of its own.
        equally_many: whether all ranks must get equally many passes. If so, all ranks call this together with equally
            many rows; if other ranks need more passes, this rank's largest passes are divided into halves.
        padded: whether the models also compute padding, so that padding counts as tokens.
        group: the ranks that compute together (engine/models/sequence_parallel.py), which call this together. The rows
            of all of them are divided among the same passes, for the largest `tokens` of a rank. A rank may have no
            rows in a pass.
    """
    lengths = rollout.attention_mask[:, : rollout.prompt_length].sum(-1), rollout.response_mask.sum(-1)
    prompt, response = torch.stack(lengths).tolist()
    pieces = passes(prompt, response, tokens, equally_many, padded, group)
    rows = torch.tensor([*chain(*pieces)], dtype=torch.int64, device=rollout.sequences.device)
    return list(rows.split([len(piece) for piece in pieces]))


def passes(
    prompt_lengths: list[int],
    response_lengths: list[int],
    tokens: int,
    equally_many: bool = False,
    padded: bool = True,
    group: RankGroup = ALONE,
) -> list[list[int]]:
    """As `micro_batches`, for rows of these lengths: a list with the row numbers of each forward pass."""
    prompts, responses, most = zip(*group.all_objects((prompt_lengths, response_lengths, tokens)))
    pieces = pack([*chain(*prompts)], [*chain(*responses)], max(most), padded)
    count = distributed.largest(len(pieces)) if equally_many else len(pieces)
    while len(pieces) < count:
        largest = max(range(len(pieces)), key=lambda index: len(pieces[index]))
        piece = pieces[largest]
        assert len(piece) > 1, f"{len(prompt_lengths)} rows cannot be dealt to {count} passes: another rank has more"
        pieces[largest : largest + 1] = [piece[: len(piece) // 2], piece[len(piece) // 2 :]]
    first = sum(map(len, prompts[: group.place]))
    own = range(first, first + len(prompt_lengths))
    return [[row - first for row in piece if row in own] for piece in pieces]


def pack(prompt_lengths: list[int], response_lengths: list[int], tokens: int, padded: bool = True) -> list[list[int]]:
    """The row numbers, sorted by length and divided into runs. If `padded`, (longest prompt + longest response) x rows
    is at most `tokens` in each run. If not, the sum of the rows' lengths is at most `tokens`."""
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
