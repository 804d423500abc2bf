"""The training state as parts of named tensors. A state that was written on any number of ranks and at any ZeRO stage
can be read on any other number of ranks and at any other stage.

    shards, scalars = model.shards(), model.scalars()    # with the ranks and the stage of a run
    other.load_shards(source, scalars)                   # with others; all numbers are the same bit by bit

Each rank writes the numbers that it holds; if all ranks hold the same numbers, each writes a share of them. Each rank
reads the numbers that it holds. The name of a tensor is "weights/", "exp_avg/" or "exp_avg_sq/" followed by the
parameter's name in the module; "weights" are the float32 masters if the engine has masters. The name of a buffer is
"frozen/" followed by the buffer's name. In a module without adapters, the name of a parameter that does not train is
"frozen/" followed by the parameter's name. Tied weights have one name, the first of their names. Before the first
optimizer step the state has no moments, and the step count in the scalars is 0.

Moments and step count are stored in `adam.state[tensor]`, which has the same keys in all three forms of Adam (PyTorch's
AdamW, DeepSpeedCPUAdam, TensorFlowAdam). `adam.state[tensor]` is empty before the first step with this tensor. The step
count is a tensor, on the device or on the host, or an int.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine import distributed
from engine.errors import UserError
from engine.zero.gathering import full_shape, is_partitioned, own_run

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weights", *MOMENTS, "frozen")
# The fields of a loss scaler that change during a run; all other fields are settings.
SCALER_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive numbers of a flattened tensor.

    shape: the shape of the full tensor.
    start: the index of the shard's first number in the flattened full tensor.
    values: (n,), a view of the training state, on any device and in any dtype. Whoever keeps `values` has to copy them
        before training goes on.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor


class ShardSource(Protocol):
    """A source that a training state is read from."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """{name of a tensor of the source: its full shape}."""
        ...

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (n,), of any dtype and on any device, with the numbers start .. start + n of the named tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Where the numbers of a parameter are on this rank. These are `length` numbers. The first of these numbers has
    index `start` in the flattened full parameter, and index `offset` in the flattened tensor that holds them."""

    parameter: Any
    start: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Master:
    """A tensor that the optimizer updates on this rank.

    parameters: the parameters whose numbers this tensor holds, on this rank or on another rank.
    spans: the places of the numbers that this rank holds.
    """

    tensor: Tensor
    adam: torch.optim.Optimizer
    parameters: Sequence[Any]
    spans: Sequence[Span]


class Masters(Protocol):
    """The part of a `Stage` that says which numbers each rank holds."""

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all numbers."""
        ...

    def masters(self) -> list[Master]:
        """This rank's masters, in the order of `master_shards`."""
        ...

    def loss_scaler(self) -> Any:
        """DeepSpeed's object with the SCALER_COUNTERS; None if the loss scale is constant."""
        ...

    def refresh_from_masters(self) -> None:
        """Copy the float32 masters into the module's weights. All ranks call this together."""
        ...


class TrainingState:
    """The weights, moments and counters of an engine's module; each tensor has a name."""

    def __init__(self, module: nn.Module, stage: Masters):
        self.module, self.stage = module, stage
        self.names = {parameter: name for name, parameter in module.named_parameters()}

    def shards(self) -> list[Shard]:
        """The shards that this rank writes. Each number of the state is in a shard of exactly one rank."""
        partitioned, replicated = self._frozen()
        own = self.own(self.held("weights", self._tensors()) + self._moments()) + partitioned + _rank_share(replicated)
        return [shard for shard in own if len(shard.values)]

    def held(self, kind: str, tensors: Sequence[Tensor | None]) -> list[Shard]:
        """This rank's shards of tensors that have the same layout as the masters. A shard's name is kind/PARAMETER.

        tensors: one tensor for each master; None if a master has no such tensor.
        """
        return [
            Shard(
                f"{kind}/{self.names[span.parameter]}",
                tuple(full_shape(span.parameter)),
                span.start,
                _flat(tensor).narrow(0, span.offset, span.length),
            )
            for master, tensor in zip(self.stage.masters(), tensors, strict=True)
            if tensor is not None
            for span in master.spans
        ]

    def own(self, held: list[Shard]) -> list[Shard]:
        """Those of the held shards that this rank writes. If all ranks hold all shards, this rank writes its share of
        them."""
        return _rank_share(held) if self.stage.replicated else held

    def scalars(self) -> dict:
        """Adam's step count as a JSON value. If the loss scale is dynamic, the result also has the loss scale and its
        counters."""
        scaler, masters = self.stage.loss_scaler(), self.stage.masters()
        counts = {steps_of(master.adam, master.tensor) for master in masters}
        assert len(counts) == 1, f"weights that train were stepped {sorted(counts)} times; ZeRO steps all alike"
        return {
            "adam_steps": counts.pop(),
            "loss_scale": {name: getattr(scaler, name) for name in SCALER_COUNTERS if hasattr(scaler, name)},
        }

    @torch.no_grad()
    def load(self, source: ShardSource, scalars: Mapping) -> None:
        """Restore a state that any number of ranks wrote at any stage (all ranks call this together).

        Frozen weights are read too, since a resumed run may have been started from another model.

        Raises: UserError if the state belongs to another model; in this case nothing is changed.
        """
        self._check(source.shapes(), stepped=scalars["adam_steps"] > 0)
        self.set_steps(scalars["adam_steps"])
        partitioned, replicated = self._frozen()
        read(source, self.held("weights", self._tensors()) + self._moments() + partitioned + replicated)
        scaler = self.stage.loss_scaler()
        for name, value in scalars["loss_scale"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
        self.stage.refresh_from_masters()

    def set_steps(self, steps: int) -> None:
        """Set Adam's step count for all trained weights; 0 resets it to the state before its first step."""
        masters = self.stage.masters()
        for master in masters:
            set_steps(master.adam, master.tensor, steps)
        for adam in {master.adam for master in masters}:
            settle(adam, steps)

    def _tensors(self) -> list[Tensor]:
        return [master.tensor for master in self.stage.masters()]

    def _moments(self) -> list[Shard]:
        return [
            shard
            for moment in MOMENTS
            for shard in self.held(
                moment, [moment_of(master.adam, master.tensor, moment) for master in self.stage.masters()]
            )
        ]

    def _frozen(self) -> tuple[list[Shard], list[Shard]]:
        """The frozen tensors: (the shards that only this rank holds, the whole tensors that every rank holds).

        Frozen weights of a module with adapters are not part of the state; they were loaded when the module was built.
        """
        given = getattr(self.module, "adapters", None) is not None
        trained = {parameter for master in self.stage.masters() for parameter in master.parameters}
        partitioned = []
        replicated = []
        persistent = self.module.state_dict(keep_vars=True).keys()
        parameter: Any  # has attributes that ZeRO-3 adds
        for parameter, name in self.names.items():
            if parameter in trained or given:
                continue
            if is_partitioned(parameter):
                start, length = own_run(parameter)
                partitioned.append(_frozen_shard(name, parameter, start, _flat(parameter.ds_tensor)[:length]))
            else:
                replicated.append(_frozen_shard(name, parameter, 0, _flat(parameter)))
        for name, buffer in self.module.named_buffers():
            if name in persistent:
                replicated.append(_frozen_shard(name, buffer, 0, _flat(buffer)))
        return partitioned, replicated

    def _check(self, there: Mapping[str, tuple[int, ...]], stepped: bool) -> None:
        """Raise UserError on all ranks, unless the state has exactly the tensors of this model."""
        there = {name: shape for name, shape in there.items() if name.partition("/")[0] in KINDS}
        partitioned, replicated = self._frozen()
        expected = {shard.name: shard.shape for shard in partitioned + replicated}
        for kind in ("weights", *(MOMENTS if stepped else ())):
            expected |= {
                f"{kind}/{self.names[parameter]}": tuple(full_shape(parameter))
                for master in self.stage.masters()
                for parameter in master.parameters
            }
        other = [
            f"{name} is {there.get(name, 'absent')} there and {expected.get(name, 'absent')} here"
            for name in sorted(there.keys() | expected.keys())
            if there.get(name) != expected.get(name)
        ]
        if other:
            more = f", and {len(other) - 3} more" if len(other) > 3 else ""
            raise UserError(
                f"the checkpoint is another model's: {'; '.join(other[:3])}{more}. Give the model that the run "
                "began with."
            )


def read(source: ShardSource, held: list[Shard]) -> None:
    """Fill the shards that this rank holds with numbers from the source."""
    for shard in held:
        if len(shard.values):
            source.read(shard.name, shard.start, shard.values)


def _frozen_shard(name: str, tensor: Tensor, start: int, values: Tensor) -> Shard:
    return Shard(f"frozen/{name}", tuple(full_shape(tensor)), start, values)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _rank_share(held: list[Shard]) -> list[Shard]:
    """This rank's share of shards that all ranks hold. The ranks get about equally many numbers, so a shard may be
    cut."""
    process = distributed.rank(), distributed.world_size()
    share = distributed.rank_share(sum(len(shard.values) for shard in held), of=process)
    found, place = [], 0
    for shard in held:
        begin, end = max(share.start - place, 0), min(share.stop - place, len(shard.values))
        if begin < end:
            found.append(Shard(shard.name, shard.shape, shard.start + begin, shard.values[begin:end]))
        place += len(shard.values)
    return found


def steps_of(adam: torch.optim.Optimizer, tensor: Tensor) -> int:
    """The number of steps that Adam has made with a tensor."""
    return int(adam.state[tensor].get("step", 0)) if tensor in adam.state else 0


def moment_of(adam: torch.optim.Optimizer, tensor: Tensor, moment: str) -> Tensor | None:
    """One of Adam's moments of a tensor, in the tensor's shape; None before the first step with the tensor."""
    return adam.state[tensor].get(moment) if tensor in adam.state else None


def set_steps(adam: torch.optim.Optimizer, tensor: Tensor, steps: int) -> None:
    """Set Adam's step count for a tensor; missing moments are set to 0. If `steps` is 0, Adam's state of the tensor is
    removed."""
    if not steps:
        adam.state.pop(tensor, None)
        return
    state = adam.state[tensor]
    for moment in MOMENTS:
        if moment not in state:
            state[moment] = torch.zeros_like(tensor, requires_grad=False)
    if _is_cpp(adam):
        state["step"] = steps
    else:
        on_device = any(group.get("fused") or group.get("capturable") for group in adam.param_groups)
        state["step"] = torch.tensor(float(steps), device=tensor.device if on_device else "cpu")


def settle(adam: Any, steps: int) -> None:
    """Set DeepSpeedCPUAdam's internal powers of beta to their values after `steps` steps.

    Its C++ code updates beta^t from step to step in float32. If a step count does not follow the previous one, the code
    computes the power directly, and a resumed run would differ in the last bits. To avoid this, this function repeats
    the steps on a single number.
    """
    if not _is_cpp(adam):
        return
    group = adam.param_groups[0]
    number = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, True, *number)


def _is_cpp(adam: torch.optim.Optimizer) -> bool:
    return hasattr(adam, "ds_opt_adam")


def without_gradients(adam: torch.optim.Optimizer, put_back: bool = False) -> contextlib.AbstractContextManager:
    """Within this context the optimizer's steps find no gradients, so that weights and moments do not change by one
    bit.

    A hook that runs before the optimizer's own step removes the gradients. When the hook runs, gradients are float32
    and no longer multiplied by the loss scale, at every stage; if weights are partitioned, gradients are flat shards.
    DeepSpeed still makes a whole step, and updates its counters and buffers.

    put_back: whether the gradient tensors are restored at the end. An offloaded optimizer needs this, because it uses
    the same tensors in all steps.
    """
    return _changed(adam, lambda parameter: None, put_back)


def scaled_gradients(
    adam: torch.optim.Optimizer, factors: Mapping[int, float | None]
) -> contextlib.AbstractContextManager:
    """Within this context the gradients in the optimizer's steps are multiplied by factors. factors: {id of a tensor:
    factor}. The factor None removes the gradient, so that weights and moments do not change by one bit."""
    return _changed(adam, lambda parameter: factors[id(parameter)])


@contextlib.contextmanager
def _changed(
    adam: torch.optim.Optimizer, factor_of: Callable[[Any], float | None], put_back: bool = False
) -> Iterator[None]:
    taken = []

    def change(optimizer: torch.optim.Optimizer, *_) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                factor = factor_of(parameter)
                if factor is None:
                    if put_back and parameter.grad is not None:
                        taken.append((parameter, parameter.grad))
                    parameter.grad = None
                elif parameter.grad is not None and factor != 1.0:
                    parameter.grad.mul_(factor)

    hook = adam.register_step_pre_hook(change)
    try:
        yield
    finally:
        hook.remove()
    for parameter, gradient in taken:
        parameter.grad = gradient
