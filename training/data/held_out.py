"""Held-out rows: which of the rows are set aside, drawn by the seed, and counted without those that will be dropped.

A row is asked for only as far as the drawn order is gone through, so that few are tokenised twice.
"""

from collections.abc import Callable
from itertools import islice

import numpy as np

from engine.errors import UserError
from training.data.progress import Progress

LIMIT = 3  # what the seed is used for, beside DIVIDE and DRAW of rows.py


def hold_out(
    parts: list[np.ndarray],
    own: list[int],
    held_out: float,
    seed: int,
    kept: Callable[[np.ndarray], bool],
    what: str,
    advice: str,
) -> np.ndarray:
    """The places to hold out from the parts numbered `own`; they are removed from these, in place.

    kept: whether the row at a place is not dropped. The others as split_held_out has them.
    """
    candidates = parts[own[0]] if len(own) == 1 else np.concatenate([parts[number] for number in own])
    stays = split_held_out(len(candidates), held_out, seed, what, advice, lambda number: kept(candidates[number]))
    ends = np.cumsum([len(parts[number]) for number in own])
    for number, end in zip(own, ends):
        piece = slice(end - len(parts[number]), end)
        parts[number] = candidates[piece][stays[piece]]
    return candidates[~stays]


def split_held_out(
    size: int,
    held_out: float,
    seed: int,
    what: str = "held-out rows",
    advice: str = "Give a fraction between 0 and 1, or a whole number smaller than the number of rows.",
    kept: Callable[[int], bool] = lambda number: True,
) -> np.ndarray:
    """(size,) bool: which rows are trained on; the others, drawn by `seed` alone, are held out.

    held_out: a fraction of the rows when below 1, otherwise a number of rows. kept: whether the row of a number is not
    dropped; of the others none is held out. A fraction is held out of the drawn order: of that part of it those that
    are kept, at least one, which are the same fraction of all that are kept but for the luck of the draw. what: for the
    message, where the number and the rows come from. advice: what to do then. Raises UserError if either part would
    have no row that is kept.
    """
    count = round(held_out * size) if held_out < 1 else held_out
    if count != int(count) or not 0 < count < size:
        raise UserError(
            f"{what}: cannot hold out {held_out:g} of {size} rows: both parts need at least one row. {advice}"
        )
    stays, found = np.ones(size, bool), 0
    progress = Progress(int(count), "drawing held-out rows")
    for place, number in enumerate(progress.over(np.random.default_rng(seed).permutation(size))):
        if not kept(number):
            continue
        if found == count or (held_out < 1 and found and place >= count):
            break  # this one is left to train on
        stays[number] = False
        found += 1
    else:
        raise UserError(
            f"{what}: cannot hold out {held_out:g} of {found} rows, which are all that are not left out, for their "
            f"length say (of {size}): both parts need at least one row. {advice} Or raise the length, or give "
            "--overlong cut_prompt."
        )
    return stays


def limited(places: np.ndarray, limit: int | None, seed: int, kept: Callable[[np.ndarray], bool]) -> np.ndarray:
    """At most `limit` of the places, drawn by the seed from those whose rows are `kept`, in their order."""
    if limit is None:
        return places
    order = np.random.default_rng((seed, LIMIT)).permutation(len(places)) if len(places) > limit else range(len(places))
    found = islice((number for number in order if kept(places[number])), limit)
    return places[np.sort(np.fromiter(found, int))]
