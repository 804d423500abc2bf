"""Gathers full weights from ZeRO-3's partitions, bucket by bucket. The functions also accept unpartitioned modules.

This file also manages hpZ's groups of ranks. With hpZ each group of neighbouring ranks, for example the ranks of a
node, holds a second copy of an engine's weights. ZeRO-3 gathers weights over all ranks the first time after each
optimizer step, and from then on within the group: only the first gather sends weights between nodes.
`zero_hpz_partition_size` is the number of ranks in a group.
Source: Wang et al. 2023, "ZeRO++", section 3.2; DeepSpeed 0.19.8, runtime/zero/partition_parameters.py.
"""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups
from torch import Tensor, nn

from engine import distributed
from engine.lazy import Lazy

GATHER_BUCKET = 1 << 26  # parameters gathered at a time: 256 MiB in float32


def parameter_buckets(
    module: nn.Module, names: Collection[str] | None = None
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """A module's (name, parameter) pairs, in buckets of at most GATHER_BUCKET numbers. A parameter with more numbers is
    a bucket of its own. Tied parameters occur once. names: the parameters to include; None for all."""
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in module.named_parameters():
        if names is not None and name not in names:
            continue
        if bucket and size + full_numel(parameter) > GATHER_BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += full_numel(parameter)
    if bucket:
        yield bucket


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 manages this parameter. It counts as partitioned even while it is gathered."""
    return hasattr(parameter, "ds_id")


def is_available(parameter: Any) -> bool:
    """Whether this parameter, which ZeRO-3 manages, is gathered at the moment."""
    return parameter.ds_status is ZeroParamStatus.AVAILABLE


def set_gathered(parameter: Any, whole: Tensor) -> None:
    """Let a partitioned parameter use `whole` as its data until it is partitioned again. whole: a tensor of the
    parameter's full shape and dtype."""
    parameter.data = whole.detach()
    parameter.ds_status = ZeroParamStatus.AVAILABLE


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape that a parameter has when it is gathered."""
    return getattr(parameter, "ds_shape", parameter.shape)


def full_numel(parameter: Tensor) -> int:
    """The number of elements that a parameter has when it is gathered."""
    return getattr(parameter, "ds_numel", parameter.numel())


def own_run(parameter: Any) -> tuple[int, int]:
    """(start, length) of this rank's partition in the flattened parameter.

    Rank r holds the r-th partition. All partitions have the same size. The last partitions may have padding: they hold
    fewer numbers of the parameter, or none.
    """
    size, numbers = parameter.ds_tensor.ds_numel, parameter.ds_numel
    start = min(distributed.rank() * size, numbers)
    return start, min(size, numbers - start)


def own_part(parameter: Any) -> Tensor:
    """The numbers of a parameter on this rank: the rank's partition, flat and without padding; or the whole parameter
    if it is not partitioned."""
    return parameter.ds_tensor.view(-1)[: own_run(parameter)[1]] if is_partitioned(parameter) else parameter


def set_parameter(parameter: nn.Parameter, value: Tensor) -> None:
    """Overwrite a parameter on all ranks, whether it is partitioned or not. value: the new weight in the parameter's
    full shape."""
    partitioned = is_partitioned(parameter)
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned), torch.no_grad():
        parameter.copy_(value)


@torch.no_grad()
def fill_parameters(module: nn.Module, fetch: Callable[[str], Tensor]) -> None:
    """Overwrite a module's parameters one after the other (all ranks call this together). Tied parameters are written
    once.

    fetch: a function from a parameter's name to the new weight in its full shape. For partitioned parameters only the
    main rank calls it.
    """
    for name, parameter in module.named_parameters():
        partitioned = is_partitioned(parameter)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
            if not partitioned or distributed.is_main():
                parameter.copy_(fetch(name))


@contextlib.contextmanager
def gathered_params(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Within this context partitioned parameters have their full shape on all ranks. Other parameters do not change."""
    partitioned = [p for p in parameters if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        yield


def whole_copy(module: nn.Module, *shared: object) -> nn.Module:
    """An unpartitioned copy of a module (all ranks call this together). The objects in `shared` are not copied: the
    module and its copy both refer to them."""
    with gathered_params(list(module.parameters())):
        return copy.deepcopy(module, {id(one): one for one in shared})


@contextlib.contextmanager
def gathered_state(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A context that gives the main rank the module's full weights, {name: `Lazy` tensor}; a weight is gathered when
    its tensor is copied. Other ranks get {}. All ranks enter the context together.

    Tied weights occur once, and only persistent buffers are included. While the main rank runs the body of the `with`
    statement, the other ranks wait before theirs and take part in each gather that the main rank starts. They run their
    body after the main rank has left its own.
    """
    weights = list(module.named_parameters())
    serves = any(is_partitioned(weight) for _, weight in weights)
    if not distributed.is_main():
        while serves and (index := distributed.broadcast_object(None)) is not None:
            with gathered_params([weights[index][1]]):
                pass
        yield {}
        return

    def fill(index: int, target: Tensor) -> None:
        if serves:
            distributed.broadcast_object(index)
        with gathered_params([weights[index][1]]), torch.no_grad():
            target.copy_(weights[index][1])

    state: dict[str, Tensor] = {
        name: Lazy.of(tuple(full_shape(weight)), weight.dtype, partial(fill, index))
        for index, (name, weight) in enumerate(weights)
    }
    persistent = module.state_dict(keep_vars=True).keys()
    state |= {name: buffer.detach() for name, buffer in module.named_buffers() if name in persistent}
    try:
        yield state
    finally:
        if serves:
            distributed.broadcast_object(None)


@torch.no_grad()
def whole_weights(source: nn.Module, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """An iterator over (name, full weight) of a module's parameters. Every rank gets the weights on its device,
    gathered bucket by bucket. All ranks have to call this and iterate to the end. Tied parameters occur once. An
    unpartitioned weight is not copied.

    names: the parameters to gather; None for all.
    """
    for bucket in parameter_buckets(source, names):
        runs = _gathered_runs([parameter for _, parameter in bucket if _has_shard(parameter)])
        for name, parameter in bucket:
            if _has_shard(parameter):  # a view of the gathered numbers if the bucket has only this parameter
                yield name, next(runs).reshape(-1)[: full_numel(parameter)].view(full_shape(parameter))
                continue
            with gathered_params([parameter]):
                whole = parameter.to(distributed.device(), copy=is_partitioned(parameter))
            yield name, whole
            del whole
        del runs  # frees the numbers before the next bucket is gathered


def _has_shard(parameter: Any) -> bool:
    """Whether this rank holds its partition of a parameter in the usual form: in memory, not quantized, and one of
    world_size equal partitions."""
    shard = getattr(parameter, "ds_tensor", None)
    return (
        shard is not None
        and shard.is_floating_point()
        and shard.numel() == shard.ds_numel
        and shard.ds_numel == -(-parameter.ds_numel // distributed.world_size())
    )


def _gathered_runs(parameters: list[Any]) -> Iterator[Tensor]:
    """A tensor (ranks, numbers) for each parameter, with the partitions of all ranks. Row r is the r-th part of the
    flattened weight; the last rows may have padding. One collective call gathers all parameters before this function
    returns."""
    if not parameters:
        return iter(())
    shards = [parameter.ds_tensor.data.flatten() for parameter in parameters]
    by_rank = distributed.all_gather(torch.cat(shards).to(distributed.device()))
    return iter(by_rank.split([len(shard) for shard in shards], dim=1))


_BY_SIZE: dict[int, Any] = {}
"""{number of ranks in a group: this rank's hpZ group}. A group is created once per process and serves all engines."""


@contextlib.contextmanager
def own_hpz_groups(ds_config: Mapping) -> Iterator[None]:
    """Within this context weights are partitioned, and engines are created, with the hpZ groups of this configuration,
    or without hpZ groups if the configuration has none (all ranks enter the context together).

    DeepSpeed itself supports one hpZ group per process. A second engine with hpZ would fail in an assertion, and a
    later engine without hpZ would use the first engine's group.
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
    """Within this context DeepSpeed's hpZ group is `group`, and DeepSpeed creates no other group. Yields DeepSpeed's
    function that creates a group."""
    before, make = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, groups._create_zero_param_parallel_group
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, groups._create_zero_param_parallel_group = group, lambda size: None
    try:
        yield make
    finally:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, groups._create_zero_param_parallel_group = before, make


def forget_second_copies(parameters: Iterable[Any]) -> None:
    """Drop hpZ's second copies of these weights, because this rank's partitions of the weights have changed. The next
    gather of each weight is then over all ranks.

    DeepSpeed itself drops the second copies of trained weights only; it assumes that frozen weights never change.
    """
    for parameter in parameters:
        if is_partitioned(parameter):
            parameter.ds_secondary_tensor = None
