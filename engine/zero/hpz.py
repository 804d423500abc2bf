"""hpZ: groups of neighbouring ranks that hold an engine's weights a second time, each group all of them.

ZeRO-3 gathers weights for a forward pass over all ranks, and for the backward pass, until the next step changes them,
within such a group: the ranks of one node, say, so that nothing goes between nodes. `zero_hpz_partition_size` is the
number of its ranks. Source: Wang et al. 2023, "ZeRO++", section 3.2; DeepSpeed 0.19.8,
runtime/zero/partition_parameters.py.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from deepspeed.utils import groups

from engine.zero.gathering import is_partitioned

_BY_SIZE: dict[int, Any] = {}
"""This rank's group, by the number of its ranks: made once in a process, for all engines that ask for it."""


@contextlib.contextmanager
def own_hpz_groups(ds_config: Mapping) -> Iterator[None]:
    """Within this context weights that are partitioned, and engines that are made, have the groups of this
    configuration, or none if it has none (all ranks enter it together).

    DeepSpeed has one group a process: a second engine that asks for one meets an assertion, and one that asks for none
    takes the first one's.
    """
    zero = ds_config["zero_optimization"]
    size = zero.get("zero_hpz_partition_size", 1) if zero.get("stage") == 3 else 1
    with _deepspeed_has(_group(size) if size > 1 else None):
        yield


def _group(size: int) -> Any:
    if size not in _BY_SIZE:
        with _deepspeed_has(None) as make:
            make(size)
            _BY_SIZE[size] = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    return _BY_SIZE[size]


@contextlib.contextmanager
def _deepspeed_has(group: Any) -> Iterator[Callable[[int], None]]:
    """Within this context DeepSpeed's group is this one, also where DeepSpeed would make one; gives what makes it."""
    before, make = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, groups._create_zero_param_parallel_group
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, groups._create_zero_param_parallel_group = group, lambda size: None
    try:
        yield make
    finally:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, groups._create_zero_param_parallel_group = before, make


def forget_second_copies(parameters: Iterable[Any]) -> None:
    """Have weights be gathered over all ranks once more, because this rank's partitions of them have changed.

    DeepSpeed does so itself for those that train, and takes others for what never changes.
    """
    for parameter in parameters:
        if is_partitioned(parameter):
            parameter.ds_secondary_tensor = None
