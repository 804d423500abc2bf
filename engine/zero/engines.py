"""Modules under DeepSpeed: the only file that calls deepspeed.initialize."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from engine import distributed
from engine.errors import RunStopped
from engine.trace import traced
from engine.zero.config import decoder_layers, with_fitting_bucket, with_fitting_sizes
from engine.zero.extensions import nothing_compiled
from engine.zero.gathering import fill_parameters, own_hpz_groups
from engine.zero.long_batch import LongBatch
from engine.zero.shards import Shard, ShardSource, TrainingState
from engine.zero.stages import stage_of

FLOOR_OVERFLOWS = 16
"""So many overflows in a row that leave the fp16 loss scale where it is end the run. One may be an odd batch, and with
DeepSpeed's hysteresis the first few lower nothing; after these the model does not fit into fp16."""


class Copies(Protocol):
    """Modules without ZeRO's hooks that compute in place of a TrainedModel or FrozenModel:
    `engine.copies.PlainCopies`."""

    def inferred(self, model: Any, *args, **kwargs) -> Any:
        """The forward pass without gradients or hooks; None for lack of memory. All ranks call this together."""

    def holding(self, model: Any) -> nn.Module | None:
        """The module that holds the model's current weights, or None."""


class LearningModel:
    """The interface of a model that learns, in its own engine or in one with other models (`host`).

    state: its weights, moments and counters by name.
    """

    host: Any  # a TrainedModel
    state: TrainingState

    def master_shards(self) -> list[Tensor]:
        """This rank's master weights: the tensors that the optimizer updates, each on one rank (stage 0: on all); in
        float32, or in bfloat16 if the DeepSpeed file says so."""
        return [master.tensor.data for master in self.state.stage.masters()]

    def weights_finite(self) -> bool:
        """Whether all weights, over all ranks, are finite in the compute dtype (all ranks call this).

        Reads each float32 master weight once, a fraction of what an optimizer step reads.
        """
        return self.host.are_finite(self.master_shards())

    def swapped(self, shards: list[Tensor]) -> contextlib.AbstractContextManager:
        """Within this context the model computes with other float32 weights, given like `master_shards`.

        On leaving, all weights are restored bit by bit. The two sets are exchanged in place, so this takes the memory
        of one more shard. 16-bit master weights, which could not hold float32 ones exactly, are put aside instead.
        """
        return self.host.exchanged(self.master_shards(), shards)

    def shards(self) -> list[Shard]:
        """This rank's part of the training state, as views; over all ranks each number comes exactly once."""
        return self.state.shards()

    def scalars(self) -> dict:
        """The rest of the training state, the same on all ranks: step counts and the loss scale, in a form for JSON."""
        return self.state.scalars()

    def forget_moments(self) -> None:
        """Reset Adam to its state before the first step; weights and loss scale stay (all ranks call this)."""
        self.state.set_steps(0)

    def load_shards(self, source: ShardSource, scalars: Mapping) -> None:
        """Restore the results of `shards` and `scalars`, from any number of ranks and any stage (all ranks call this).

        Adam's settings stay those of this run. Raises: UserError where the state is another model's.
        """
        self.state.load(source, scalars)
        self.host.version += 1


class TrainedModel(LearningModel):
    """A module that learns: forward, backward over micro-batches, one optimizer step, whatever the ZeRO stage.

        with model.accumulating(len(micro_batches)):
            for i, batch in enumerate(micro_batches):
                loss_sum = loss(model(...))
                model.backward(loss_sum / count_over_all_ranks, last=i == len(micro_batches) - 1)
        model.step(lr)

    Every rank must run the same number of micro-batches; a rank with fewer runs dummies with a loss times 0.
    """

    def __init__(self, module: nn.Module, ds_config: dict, optimizer: torch.optim.Optimizer, role: str = "model"):
        _gather_by_layer(module, ds_config)
        ds_config = with_fitting_bucket(module, with_fitting_sizes(module, ds_config))
        with nothing_compiled(), own_hpz_groups(ds_config):
            self.ds_engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config)
        self.module: Any = self.ds_engine.module  # a Policy or a Scorer, classes that stand above this folder
        self.role = role  # for messages and traces
        self.copies: Copies | None = None  # passes without gradients go through these
        self.stage = self.ds_engine.zero_optimization_stage()
        self.version = 0  # goes up when the weights change, so that copies know whether they are stale
        self.grad_norm = 0.0  # of the latest step, before clipping
        self.scales_loss = self.ds_engine.fp16_enabled()
        """Whether gradients that overflow are a matter of course (fp16) and not a reason to stop."""
        self._by_stage = stage_of(self.ds_engine)
        self._overflows_at_floor = 0  # overflows in a row, with the loss scale unchanged
        self.state = TrainingState(self.module, self._by_stage)
        _, sums = self.ds_engine.get_data_types()
        self.long_batch = LongBatch(self.module, role, self._by_stage.forget_gradients, sums)
        self._passes = 0  # backward passes since the last step
        self.ds_engine.train()

    @property
    def host(self) -> "TrainedModel":
        """The engine that has this model: itself."""
        return self

    def __call__(self, *args, **kwargs):
        """The module's forward pass; without gradients by its copy, if there are `copies`."""
        return self.ds_engine(*args, **kwargs) if torch.is_grad_enabled() else _inferred(self, *args, **kwargs)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Does nothing: a trained model always stands where it computes."""
        return contextlib.nullcontext()

    def accumulating(self, passes: int) -> contextlib.AbstractContextManager:
        """A context for so many passes, forward and backward, of the step that is to follow (all ranks call this): at
        stage 3 weights are gathered once at most, and gradients reduced in the last, as memory allows (`LongBatch`)."""
        copy = None if self.copies is None else self.copies.holding(self)
        return self.long_batch.of(passes, not self._passes, copy)

    @traced("{0.role} backward")
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`, this rank's share of the global mean.

        Args:
            loss: scalar; this rank's loss sum divided by the count over *all* ranks and micro-batches. DeepSpeed
                averages gradients over ranks, which the factor world_size undoes.
            last: whether the optimizer step follows; gradients are then reduced over ranks.
        """
        # Not "managed_gradient_accumulation": false, under which stages 0 and 1 reduce inside step(), too late for an
        # overflow or a gradient norm to be looked at before weights change.
        self.long_batch.before_backward()
        self._passes += 1
        self.ds_engine.set_gradient_accumulation_boundary(last)
        factor = distributed.world_size() * self._by_stage.loss_factor
        self.ds_engine.backward(loss * factor, scale_wrt_gas=False)

    def overflowed(self) -> bool:
        """Whether a gradient is infinite or NaN on any rank, after the last backward."""
        return self._by_stage.overflowed()

    @traced("{0.role} optimizer step")
    def step(self, lr: float, overflow: bool = False, skip: bool = False) -> bool:
        """Apply one optimizer step at learning rate `lr`; returns whether the weights changed.

        Groups with an "lr_ratio" learn at so many times that rate.

        Args:
            overflow: what `overflowed` said; in fp16 the loss scale is lowered and the gradients are dropped.
            skip: drop the gradients whatever they are, because a partner overflowed or the losses are not wanted.

        Raises: RunStopped after FLOOR_OVERFLOWS overflows in a row that found the loss scale at its floor, or fixed.
        """
        for group in self.ds_engine.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        return self._step(overflow, skip)

    def step_roles(self, lrs: Mapping[str, float], overflow: bool = False, skip: bool = False) -> bool:
        """`step`, for an engine that trains one model: `lrs` has its learning rate by its role."""
        return self.step(lrs[self.role], overflow, skip)

    def _step(self, overflow: bool, skip: bool) -> bool:
        """`step`, with the learning rates as the optimizer's groups have them."""
        self._passes = 0
        if skip and not (overflow and self.scales_loss):
            self._by_stage.drop()
            return False
        scale = self.loss_scale
        norm = self._by_stage.step(overflow)
        self._overflows_at_floor = self._overflows_at_floor + 1 if overflow and self.loss_scale >= scale else 0
        if self._overflows_at_floor >= FLOOR_OVERFLOWS:
            raise RunStopped(
                f"fp16: the {self.role}'s gradients overflowed {FLOOR_OVERFLOWS} times in a row with the loss scale at "
                f"its floor, {scale:g}, so that nothing more is learned. Look at the loss and the gradient norms of "
                "the steps before, and lower the learning rates; bf16 and fp32 have the range.",
                good_until=math.inf,
            )
        if overflow:
            return False
        self.grad_norm = norm
        self.version += 1
        return True

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale; 1 in other dtypes."""
        return float(self.ds_engine.optimizer.loss_scale) if self.scales_loss else 1.0

    def are_finite(self, shards: list[Tensor]) -> bool:
        """Whether these tensors, over all ranks, are numbers of the dtype that is computed in (all ranks call this)."""
        limit = torch.finfo(torch.float16 if self.scales_loss else torch.float32).max
        ends = [torch.stack(torch.aminmax(shard)) for shard in shards if shard.numel()]
        bad = ~(torch.stack(ends).abs() <= limit).all() if ends else False  # NaN compares false
        return not distributed.any_rank(bad)

    @contextlib.contextmanager
    def exchanged(self, masters: list[Tensor], shards: list[Tensor]) -> Iterator[None]:
        """`swapped`, for some of the masters."""
        pairs = list(zip(masters, shards, strict=True))
        kept = [own.clone() if own.dtype != other.dtype else None for own, other in pairs]
        self._exchange(pairs, kept)
        try:
            yield
        finally:
            self._exchange(pairs, kept, back=True)

    @torch.no_grad()
    def _exchange(self, pairs: list[tuple[Tensor, Tensor]], kept: list[Tensor | None], back: bool = False) -> None:
        for (own, other), aside in zip(pairs, kept, strict=True):
            if aside is not None:
                own.copy_(aside if back else other)
            else:
                before = own.clone()
                own.copy_(other)
                other.copy_(before)
        self._by_stage.refresh_from_masters()
        self.version += 1


class FrozenModel:
    """A module that only computes. `offload` at stage 0 keeps it in host memory outside `on_device`."""

    def __init__(self, module: nn.Module, ds_config: dict, offload: bool = False, role: str = "model"):
        module.requires_grad_(False)
        _gather_by_layer(module, ds_config)
        with own_hpz_groups(ds_config):
            self.ds_engine, *_ = deepspeed.initialize(model=module, config=with_fitting_sizes(module, ds_config))
        self.module: Any = self.ds_engine.module  # a Policy or a Scorer, classes that stand above this folder
        self.role = role  # for messages and traces
        self.copies: Copies | None = None
        self.stage = self.ds_engine.zero_optimization_stage()
        self.version = 0  # goes up when other weights are taken
        self._moves = offload and self.stage == 0
        self.ds_engine.eval()
        if self._moves:
            self.module.to("cpu")

    @property
    def host(self) -> "FrozenModel":
        """The engine that has this model: itself."""
        return self

    @torch.no_grad()
    def __call__(self, *args, **kwargs):
        """The module's forward pass, by its copy if there are `copies`."""
        return _inferred(self, *args, **kwargs)

    def take(self, fetch: Callable[[str], Tensor]) -> None:
        """Compute with other weights from now on, each given by its name in `module.model` (all ranks call this).

        fetch: as in `fill_parameters`.
        """
        fill_parameters(self.module.model, fetch)
        self.version += 1

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Within this context the weights are where they are computed with."""
        if self._moves:
            self.module.to(distributed.device())
        try:
            yield
        finally:
            if self._moves:
                self.module.to("cpu")


class HostedRole:
    """A model within the engine of another one. It is called and asked like a TrainedModel or FrozenModel.

    Args:
        host: around a module that computes as `role` when it is told to (`Backbone.take_role`).
    """

    def __init__(self, host: TrainedModel, role: str):
        self.host, self.role = host, role

    @property
    def module(self) -> Any:
        """The Policy or Scorer that the host's module is in this role."""
        return self.host.module.as_role(self.role)

    @property
    def stage(self) -> int:
        """The host's ZeRO stage."""
        return self.host.stage

    def __call__(self, *args, **kwargs):
        """The host's forward pass in this role, by its copy if there is one and no gradient is wanted."""
        return self.host(*args, role=self.role, **kwargs)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Does nothing: a trained model always stands where it computes."""
        return self.host.on_device()


class FrozenRole(HostedRole):
    """A frozen model within the engine of a trained one: without its adapters, or with frozen copies of what trains.

        reference = FrozenRole(actor, "reference")
        logprobs, _ = reference(sequences, attention_mask, position_ids, response_length=8)

    It is called and asked like a FrozenModel, and has no weights of its own.

    role: "reference" or "reward".
    """

    @torch.no_grad()
    def __call__(self, *args, **kwargs):
        """The host's forward pass in this role, by its copy if there is one."""
        return super().__call__(*args, **kwargs)


def _inferred(model: TrainedModel | FrozenModel, *args, **kwargs):
    """The forward pass by the model's copy, without autograd's bookkeeping; by its engine where there is none."""
    if model.copies is not None:
        result = model.copies.inferred(model, *args, **kwargs)
        if result is not None:
            return result
        model.copies = None
    return model.ds_engine(*args, **kwargs)


def _gather_by_layer(module: nn.Module, ds_config: dict) -> None:
    """Have ZeRO-3 fetch and free decoder layers as one: one hook and one gather each, not one for every matrix.

    A file that names its own `leaf_module` is left to it.
    """
    zero = ds_config["zero_optimization"]
    layers = {type(layer) for layer in decoder_layers(module)}
    if zero.get("stage") == 3 and "leaf_module" not in zero and layers:
        set_z3_leaf_modules(module, list(layers))
