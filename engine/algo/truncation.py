"""Truncates texts at given tokens: responses of fixed length at the end, queries at the beginning and the end."""

from collections.abc import Sequence

import torch
from torch import Tensor


def kept_positions(responses: Tensor, token: int, after: int = 0) -> Tensor:
    """A mask, (B, T) bool, of the positions of each response up to and including the first `token` at or after position
    `after`. If `token` does not occur there, the mask has all of them.

    These positions hold the text that is scored. Sampling does not stop at `token`.

    Args:
        responses: (B, T) int64.

    Source: openai/lm-human-preferences cbfd210b, lm_tasks.py, `postprocess_fn_from_hparams`.
    """
    found = _matches(responses, token, after).long()
    return found.cumsum(-1) - found == 0


def has_end(responses: Tensor, token: int, after: int = 0) -> Tensor:
    """Whether `token` occurs in each response at or after position `after`: (B,) bool. Arguments: as for
    `kept_positions`.

    Source: openai/lm-human-preferences cbfd210b, lm_tasks.py, `filter_fn_from_hparams`.
    """
    return _matches(responses, token, after).any(-1)


def _matches(responses: Tensor, token: int, after: int) -> Tensor:
    return (responses == token) & (torch.arange(responses.shape[1], device=responses.device) >= after)


def trim_query(
    tokens: Sequence[int], length: int, start: int | None = None, end: int | None = None
) -> list[int] | None:
    """The part of `tokens` that is the query: of the first `length` tokens after the first `start` token, those up to
    and including the last `end`.

    None if `start` or `end` is given and does not occur; callers leave out such a text. A `start` that is the last
    token of the text removes nothing.

    Source: openai/lm-human-preferences cbfd210b, language/datasets.py, `Dataset.tf_dataset`.
    """
    tokens = list(tokens)
    if start is not None:
        if start not in tokens:
            return None
        tokens = tokens[tokens.index(start) + 1 :] or tokens
    tokens = tokens[:length]
    if end is not None:
        if end not in tokens:
            return None
        tokens = tokens[: len(tokens) - tokens[::-1].index(end)]
    return tokens
