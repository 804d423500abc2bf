"""How much of a model ZeRO-3 holds whole while it computes through partitions.

Layers are fetched one after the other, some ahead of time, and freed behind their use unless they come again soon.
Source: DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (fetch_sub_module, release_sub_module).
"""

from collections.abc import Sequence
from typing import Any

from engine.zero.gathering import GATHER_BUCKET


def gathered_numbers(units: Sequence[int], zero: Any, backward: bool) -> int:
    """The most numbers that are whole at once.

    units: the numbers of what is fetched in one piece, in the order of the forward pass. zero: DeepSpeed's settings.
    backward: whether a backward pass follows, in the opposite order.
    """
    order = [*range(len(units)), *(reversed(range(len(units))) if backward else ())]
    held: set[int] = set()
    ahead, most = 0, 0  # the first place of `order` that nothing was fetched for, the most numbers

    def numbers() -> int:
        return sum(units[unit] for unit in held)

    for place, unit in enumerate(order):
        fetched = 0 if unit in held else units[unit]
        held.add(unit)
        ahead = max(ahead, place + 1)
        room = min(int(zero.max_live_parameters) - numbers(), int(zero.prefetch_bucket_size))
        prefetched = 0
        while ahead < len(order) and prefetched < room:
            if order[ahead] not in held:
                held.add(order[ahead])
                prefetched += units[order[ahead]]
            ahead += 1
        # What is fetched together arrives in one buffer, and is copied out of it.
        most = max(most, numbers() + max(fetched, prefetched))
        if unit not in order[place + 1 : ahead] and not _soon(unit, order[place + 1 :], units, zero):
            held.discard(unit)
    return most


def bucket_numbers(numbers: int, largest: int, world: int) -> float:
    """What a gather of a model's weights, so many numbers, holds at a time on each of `world` ranks: what it sends and
    what it receives. largest: numbers of the largest weight."""
    return min(numbers, GATHER_BUCKET + largest) * (1 + 1 / world)


def _soon(unit: int, following: Sequence[int], units: Sequence[int], zero: Any) -> bool:
    """Whether a unit comes again within `max_reuse_distance` numbers."""
    distance = 0
    for other in following:
        if distance >= int(zero.max_reuse_distance):
            return False
        if other == unit:
            return True
        distance += units[other]
    return False
