"""Gathers full weights from ZeRO-3's partitions, bucket by bucket; works on unpartitioned modules too.

hpZ: each group of neighbouring ranks (the ranks of one node, for example) holds all of an engine's weights a second
time. ZeRO-3 gathers weights for the forward pass over all ranks, and for backward passes, until the next step changes
the weights, within the group, so that nothing goes between nodes. `zero_hpz_partition_size` is the number of ranks in a
group. Source: Wang et al. 2023, "ZeRO++", section 3.2; DeepSpeed 0.19.8, runtime/zero/partition_parameters.py.
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
from engine.trace import traced

GATHER_BUCKET = 1 << 26  # parameters gathered at a time: 256 MiB in float32


def parameter_buckets(
    module: nn.Module, names: Collection[str] | None = None
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """A module's named parameters, or those of these names, in runs of at most GATHER_BUCKET elements, a larger one by
    itself; tied ones come once."""
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
    """Whether ZeRO-3 manages a parameter, gathered at this moment or not."""
    return hasattr(parameter, "ds_id")


def is_available(parameter: Any) -> bool:
    """Whether a parameter that ZeRO-3 manages stands gathered."""
    return parameter.ds_status is ZeroParamStatus.AVAILABLE


def stand_in(parameter: Any, whole: Tensor) -> None:
    """Have a tensor of its full shape and dtype be a partitioned parameter's numbers until it is partitioned again."""
    parameter.data = whole.detach()
    parameter.ds_status = ZeroParamStatus.AVAILABLE


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter when it is gathered."""
    return getattr(parameter, "ds_shape", parameter.shape)


def full_numel(parameter: Tensor) -> int:
    """How many numbers a parameter has when it is gathered."""
    return getattr(parameter, "ds_numel", parameter.numel())


def own_run(parameter: Any) -> tuple[int, int]:
    """(start, length) of the run of a partitioned parameter's numbers, flattened, that this rank holds.

    Rank r holds the r-th run, all of one length; the last ones are shorter, or have none, and are padded.
    """
    size, numbers = parameter.ds_tensor.ds_numel, parameter.ds_numel
    start = min(distributed.rank() * size, numbers)
    return start, min(size, numbers - start)


def own_part(parameter: Any) -> Tensor:
    """What this rank holds of a parameter: its partition, flat and without padding, or all of it."""
    return parameter.ds_tensor.view(-1)[: own_run(parameter)[1]] if is_partitioned(parameter) else parameter


def set_parameter(parameter: nn.Parameter, value: Tensor) -> None:
    """Overwrite a parameter, partitioned or not, on all ranks; `value` has its full shape."""
    partitioned = is_partitioned(parameter)
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned), torch.no_grad():
        parameter.copy_(value)


@torch.no_grad()
def fill_parameters(module: nn.Module, fetch: Callable[[str], Tensor]) -> None:
    """Overwrite a module's parameters, one after the other, by their names; tied ones come once (all ranks call this).

    fetch: gives a weight of full shape; of partitioned ones the main rank alone asks for it.
    """
    for name, parameter in module.named_parameters():
        partitioned = is_partitioned(parameter)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
            if not partitioned or distributed.is_main():
                parameter.copy_(fetch(name))


@contextlib.contextmanager
def gathered_params(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Within this context partitioned parameters have their full shape on all ranks; nothing happens to others."""
    partitioned = [p for p in parameters if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        yield


def whole_copy(module: nn.Module, *shared: object) -> nn.Module:
    """An unpartitioned copy of a module, which shares these objects with it (all ranks call this)."""
    with gathered_params(list(module.parameters())):
        return copy.deepcopy(module, {id(one): one for one in shared})


@contextlib.contextmanager
def lent_state(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within this context the main rank has the module's full weights by name, as tensors that are gathered when they
    are asked for (`Lazy`); others have {} (all ranks call this).

    Tied weights come once, buffers only if they are persistent. The other ranks enter the context's block when the main
    rank has left it: until then they take part in the gathers that it asks for, in whatever order and however often.
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
    persistent = module.state_dict().keys()
    state |= {name: buffer.detach() for name, buffer in module.named_buffers() if name in persistent}
    try:
        yield state
    finally:
        if serves:
            distributed.broadcast_object(None)


@traced("gather of weights")
@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module, names: Collection[str] | None = None) -> None:
    """Fill an unpartitioned module of the same architecture with a module's weights (all ranks call this).

    A bucket costs one collective call: partitions are joined on each rank and sent as one. GatheredParameters, which is
    made for a user's own surgery on weights, has all ranks compare notes on each parameter first.

    names: of those parameters that the target does not hold already; None for all.
    """
    parameters, buffers = dict(target.named_parameters()), dict(target.named_buffers())
    there = {name for name, _ in source.named_parameters()}
    assert there == parameters.keys(), f"not of one architecture: {sorted(there ^ parameters.keys())[:4]}"
    for bucket in parameter_buckets(source, names):
        partitioned = [(name, parameter) for name, parameter in bucket if _has_shard(parameter)]
        if partitioned:
            _copy_bucket(partitioned, parameters)
        others = [(name, parameter) for name, parameter in bucket if not _has_shard(parameter)]
        with gathered_params([parameter for _, parameter in others]):
            for name, parameter in others:
                parameters[name].copy_(parameter)
    for name, buffer in source.named_buffers():
        buffers[name].copy_(buffer)


@torch.no_grad()
def whole_weights(source: nn.Module, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """A module's full weights by name on every rank's device, gathered a bucket at a time (all ranks call this, and
    take all of them). Tied ones come once. What is not partitioned are the weights themselves.

    names: of those parameters that are wanted; None for all.
    """
    for bucket in parameter_buckets(source, names):
        runs = _gathered_runs([parameter for _, parameter in bucket if _has_shard(parameter)])
        for name, parameter in bucket:
            if _has_shard(parameter):  # a view, where the bucket is of this one parameter
                yield name, next(runs).reshape(-1)[: full_numel(parameter)].view(full_shape(parameter))
                continue
            with gathered_params([parameter]):
                whole = parameter.to(distributed.device(), copy=is_partitioned(parameter))
            yield name, whole
            del whole
        del runs  # before the next bucket is gathered


def try_bucket(source: nn.Module, names: Collection[str] | None = None, whole: bool = False) -> None:
    """Take the most memory that gathering a bucket takes, and leave it to torch's allocator: so a rank that has none
    finds out before ranks exchange anything.

    names: of those parameters that are to be gathered; None for all. whole: as whole_weights does, which makes one
    weight after the other; copy_weights fills some that are there. Raises: torch.OutOfMemoryError.
    """
    buckets = ([p for _, p in bucket if _has_shard(p)] for bucket in parameter_buckets(source, names))
    needs = [(_bucket_needs(bucket, whole), bucket[0].dtype) for bucket in buckets if bucket]
    if needs:
        sizes, dtype = max(needs, key=lambda need: sum(need[0]))
        taken = [torch.empty(size, dtype=dtype, device=distributed.device()) for size in sizes]
        del taken


def _bucket_needs(bucket: list[Any], whole: bool) -> tuple[int, int]:
    """How many numbers are received; and are sent, or then made of those, unless these are the one weight itself."""
    sent = sum(parameter.ds_tensor.ds_numel for parameter in bucket)
    made = max(map(full_numel, bucket)) if whole and len(bucket) > 1 else 0
    return sent * distributed.world_size(), max(sent, made)


def _has_shard(parameter: Any) -> bool:
    """Whether this rank holds its part of a partitioned parameter as it is: not on a disk, not quantized, and one part
    for each rank."""
    shard = getattr(parameter, "ds_tensor", None)
    return (
        shard is not None
        and shard.is_floating_point()
        and shard.numel() == shard.ds_numel
        and shard.ds_numel == -(-parameter.ds_numel // distributed.world_size())
    )


def _copy_bucket(bucket: list[tuple[str, Any]], targets: Mapping[str, Tensor]) -> None:
    runs = _gathered_runs([parameter for _, parameter in bucket])
    for (name, _), column in zip(bucket, runs):
        target, size = targets[name].view(-1), column.shape[1]
        full = len(target) // size  # runs without padding, which are one strided copy however many ranks there are
        target[: full * size].view(full, size).copy_(column[:full])
        rest = target[full * size :]
        if len(rest):
            rest.copy_(column[full, : len(rest)])


def _gathered_runs(parameters: list[Any]) -> Iterator[Tensor]:
    """Of each parameter what all ranks hold, (ranks, numbers): rank r holds the r-th run of the flattened weight, the
    last one padded. All are sent at once, when this is called."""
    if not parameters:
        return iter(())
    shards = [parameter.ds_tensor.data.flatten() for parameter in parameters]
    by_rank = distributed.all_gather(torch.cat(shards).to(distributed.device()))
    return iter(by_rank.split([len(shard) for shard in shards], dim=1))


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
