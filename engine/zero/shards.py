"""The numbers of a training state as runs of named tensors, which any number of ranks and any ZeRO stage can read.

    shards, scalars = model.shards(), model.scalars()    # on the ranks and at the stage that a run has
    other.load_shards(source, scalars)                   # on others, bit by bit

Each rank writes the numbers that it holds, or its share of what all hold, and reads those that it holds. A name is
"weights/", "exp_avg/" or "exp_avg_sq/" and the parameter's in the module (float32 masters where there are some); or
"frozen/" and that of a parameter that does not train (in a module without adapters), or of a buffer. Tied weights have
one name, the first. Before the first step there are no moments, and the step count in the scalars is 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine import distributed
from engine.errors import UserError
from engine.zero.adam_state import MOMENTS, moment_of, set_steps, settle, steps_of
from engine.zero.gathering import full_shape, is_partitioned, own_run

KINDS = ("weights", *MOMENTS, "frozen")
# What of a loss scaler changes during a run; all else of it is a setting.
SCALER_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, slots=True)
class Shard:
    """A run of a tensor's numbers.

    shape: of the full tensor. start: the first number's place in the flattened full tensor. values: (n,) a view of the
    live state, on any device and of any dtype; to be copied before training goes on.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor


class ShardSource(Protocol):
    """Where a training state is read from."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shape of each tensor that is there, by its name."""
        ...

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (n,), of any dtype and on any device, with the numbers start .. start + n of the named tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Where a run of a parameter's numbers lies on this rank: from number `start` of the flattened full parameter, and
    from `offset` in the flattened tensor that holds it."""

    parameter: Any
    start: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Master:
    """A tensor that the optimizer updates on this rank, in one piece.

    parameters: those that it is a part of, on whichever rank their numbers lie. spans: what of them lies here.
    """

    tensor: Tensor
    adam: torch.optim.Optimizer
    parameters: Sequence[Any]
    spans: Sequence[Span]


class Masters(Protocol):
    """What a `Stage` knows of where its numbers lie."""

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all of them."""
        ...

    def masters(self) -> list[Master]:
        """This rank's, in the order of `master_shards`."""
        ...

    def loss_scaler(self) -> Any:
        """DeepSpeed's object that has the SCALER_COUNTERS; None where the loss scale is a constant."""
        ...

    def refresh_from_masters(self) -> None:
        """Give the module the weights that its float32 masters hold. All ranks call this together."""
        ...


class TrainingState:
    """The weights, moments and counters of an engine's module, by name."""

    def __init__(self, module: nn.Module, stage: Masters):
        self.module, self.stage = module, stage
        self.names = {parameter: name for name, parameter in module.named_parameters()}

    def shards(self) -> list[Shard]:
        """What this rank writes: over all ranks each number comes exactly once."""
        partitioned, replicated = self._frozen()
        own = self.own(self.held("weights", self._tensors()) + self._moments()) + partitioned + _rank_share(replicated)
        return [shard for shard in own if len(shard.values)]

    def held(self, kind: str, tensors: Sequence[Tensor | None]) -> list[Shard]:
        """What this rank holds of tensors that lie as the masters do, under the names kind/PARAMETER.

        tensors: one for each master; None for one that does not exist.
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
        """Those of the held runs that this rank writes: its share where all ranks hold all."""
        return _rank_share(held) if self.stage.replicated else held

    def scalars(self) -> dict:
        """Adam's step count, and the loss scale with its counters if it moves, as JSON has them."""
        scaler, masters = self.stage.loss_scaler(), self.stage.masters()
        counts = {steps_of(master.adam, master.tensor) for master in masters}
        assert len(counts) == 1, f"weights that train were stepped {sorted(counts)} times; ZeRO steps all alike"
        return {
            "adam_steps": counts.pop(),
            "loss_scale": {name: getattr(scaler, name) for name in SCALER_COUNTERS if hasattr(scaler, name)},
        }

    @torch.no_grad()
    def load(self, source: ShardSource, scalars: Mapping) -> None:
        """Put the state back, whatever layout wrote it (all ranks call this).

        What does not train is read too: a run that goes on may have been given another model to start from.

        Raises: UserError where the state is another model's, before anything is changed.
        """
        self._check(source.shapes(), stepped=scalars["adam_steps"] > 0)
        for master in self.stage.masters():
            set_steps(master.adam, master.tensor, scalars["adam_steps"])
        for adam in {master.adam for master in self.stage.masters()}:
            settle(adam, scalars["adam_steps"])
        partitioned, replicated = self._frozen()
        read(source, self.held("weights", self._tensors()) + self._moments() + partitioned + replicated)
        scaler = self.stage.loss_scaler()
        for name, value in scalars["loss_scale"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
        self.stage.refresh_from_masters()

    def forget_moments(self) -> None:
        """Have Adam be as before its first step; weights and loss scale stay."""
        masters = self.stage.masters()
        for master in masters:
            set_steps(master.adam, master.tensor, 0)
        for adam in {master.adam for master in masters}:
            settle(adam, 0)

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
        """What does not train: runs of which each rank has its own, and whole tensors that every rank has.

        Frozen weights of a module with adapters are none of the state: whoever builds the module has loaded them.
        """
        given = getattr(self.module, "adapters", None) is not None
        trained = {parameter for master in self.stage.masters() for parameter in master.parameters}
        partitioned, replicated, persistent = [], [], self.module.state_dict().keys()
        parameter: Any  # with what ZeRO-3 adds to one
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
        """Raise UserError, on all ranks alike, where the state has not exactly this model's tensors."""
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
    """Fill the runs that this rank holds."""
    for shard in held:
        if len(shard.values):
            source.read(shard.name, shard.start, shard.values)


def _frozen_shard(name: str, tensor: Tensor, start: int, values: Tensor) -> Shard:
    return Shard(f"frozen/{name}", tuple(full_shape(tensor)), start, values)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _rank_share(held: list[Shard]) -> list[Shard]:
    """This rank's share of runs that all ranks hold, by numbers, cut where a border falls."""
    share = distributed.rank_share(sum(len(shard.values) for shard in held))
    found, place = [], 0
    for shard in held:
        begin, end = max(share.start - place, 0), min(share.stop - place, len(shard.values))
        if begin < end:
            found.append(Shard(shard.name, shard.shape, shard.start + begin, shard.values[begin:end]))
        place += len(shard.values)
    return found
