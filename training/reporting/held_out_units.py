"""What was measured of each held-out example of steps 1 and 2, brought together from the ranks."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from engine import distributed
from training.reporting.standard_errors import Units


def gathered(size: int, parts: Iterable[tuple[list[int], Mapping[str, Tensor]]]) -> Units:
    """A number for each of `size` examples, by name, in their order and the same on all ranks (all call this).

    parts: batch by batch the indices of this rank's examples, each on one rank only, and by name (B,) tensors whose
    first rows are theirs; the rest fills up a batch. All ranks have at least one batch, with the same names.
    """
    own: dict[str, Tensor] = {}
    for indices, values in parts:
        for name, column in values.items():
            table = own.setdefault(name, torch.zeros(size, dtype=torch.float64, device=column.device))
            table[torch.tensor(indices, dtype=torch.long, device=column.device)] = column[: len(indices)].double()
    return {name: distributed.all_reduce_sum(own[name]).tolist() for name in sorted(own)}
