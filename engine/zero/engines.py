"""Models in DeepSpeed engines: trained models, frozen models, and models that share another model's engine. No other
file calls deepspeed.initialize."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from engine import distributed
from engine.errors import RunStopped, UserError
from engine.host_memory import copies_in, host_buffer
from engine.trace import traced
from engine.zero.config import decoder_layers, with_fitting_bucket, with_fitting_sizes
from engine.zero.extensions import nothing_compiled
from engine.zero.gather_once import InferenceGather, TrainingGather
from engine.zero.gathering import fill_parameters, is_available, is_partitioned, own_hpz_groups
from engine.zero.stages import stage_of
from engine.zero.training_state import Shard, ShardSource, TrainingState

FLOOR_OVERFLOWS = 16
"""The run ends after this many fp16 overflows in a row that do not lower the loss scale. A few overflows may come from
an unusual batch, and DeepSpeed's hysteresis does not lower the scale at the first ones. This many overflows mean that
the model's numbers are too large for fp16."""


class Copy(Protocol):
    """The interface of `engine.actor_copy.ActorCopy`."""

    def current_module(self) -> nn.Module | None:
        """The copy if it holds the model's current weights, whole; otherwise None."""


class LearningModel:
    """A model that learns, in an engine of its own or in an engine that it shares with other models.

    host: the engine. state: the model's weights, moments and counters by name.
    """

    host: Any  # a TrainedModel
    state: TrainingState

    def master_shards(self) -> list[Tensor]:
        """This rank's master weights, which are the tensors that the optimizer updates. At stage 0 every rank has all
        numbers; at other stages each number is on exactly one rank. Master weights are float32, or bfloat16 if the
        DeepSpeed file says so."""
        return [master.tensor.data for master in self.state.stage.masters()]

    def weights_finite(self) -> bool:
        """Whether all weights on all ranks are finite in the compute dtype (all ranks call this together).

        Each master weight is read once, which is a fraction of what an optimizer step reads.
        """
        return self.host.are_finite(self.master_shards())

    def swapped(self, shards: list[Tensor]) -> contextlib.AbstractContextManager:
        """Within this context the model computes with the float32 weights `shards`, of the same shapes as
        `master_shards`.

        After the context both sets of weights are as before, bit by bit. The two sets are exchanged tensor by tensor,
        which needs memory for one further tensor. 16-bit master weights cannot hold float32 numbers, so 16-bit master
        weights are copied first and restored from the copy.
        """
        return self.host.exchanged(self.master_shards(), shards)

    def shards(self) -> list[Shard]:
        """This rank's part of the training state, as views. Each number of the training state is in the part of exactly
        one rank."""
        return self.state.shards()

    def scalars(self) -> dict:
        """The rest of the training state, which is equal on all ranks: step counts and the loss scale, as JSON
        values."""
        return self.state.scalars()

    def forget_moments(self) -> None:
        """Reset Adam to its state before the first step. Weights and loss scale do not change (all ranks call this
        together)."""
        self.state.set_steps(0)

    def load_shards(self, source: ShardSource, scalars: Mapping) -> None:
        """Restore the state that `shards` and `scalars` returned on any number of ranks and at any stage (all ranks
        call this together).

        Adam's settings remain those of this run. Raises: UserError if the state belongs to another model.
        """
        self.state.load(source, scalars)
        self.host.version += 1


class TrainedModel(LearningModel):
    """A model that learns in its own engine: forward and backward passes over micro-batches, then one optimizer step,
    in the same way at every ZeRO stage.

        with model.accumulating(len(micro_batches)):
            for i, batch in enumerate(micro_batches):
                loss_sum = loss(model(...))
                model.backward(loss_sum / count_over_all_ranks, last=i == len(micro_batches) - 1)
        model.step(lr)

    Every rank must run the same number of micro-batches. A rank with fewer runs dummies, whose loss is multiplied by 0.
    """

    def __init__(self, module: nn.Module, ds_config: dict, optimizer: torch.optim.Optimizer, role: str = "model"):
        _prepare_stage_3(module, ds_config)
        ds_config = with_fitting_bucket(module, with_fitting_sizes(module, ds_config))
        with nothing_compiled(), own_hpz_groups(ds_config):
            self.ds_engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config)
        self.module: Any = self.ds_engine.module  # a Policy or a Scorer; engine/zero may not import these classes
        self.role = role  # for messages and traces
        self.copy: Copy | None = None  # its weights stand in for the partitions while they are the same
        self.stage = self.ds_engine.zero_optimization_stage()
        self.version = 0  # increases when the weights change, so that a copy knows whether it is up to date
        self.grad_norm = 0.0  # gradient norm of the latest step, before clipping
        self.scales_loss = self.ds_engine.fp16_enabled()
        """Whether the loss is scaled (fp16). With a loss scale overflows are normal, and not a reason to stop."""
        self._by_stage = stage_of(self.ds_engine)
        self._overflows_at_floor = 0  # the number of overflows in a row that left the loss scale unchanged
        self.state = TrainingState(self.module, self._by_stage)
        _, sums = self.ds_engine.get_data_types()
        self.inference_gather = InferenceGather(self.module)
        self.training_gather = TrainingGather(self.module, role, self._by_stage.forget_gradients, sums)
        self._passes = 0  # backward passes since the last step
        self.ds_engine.train()

    @property
    def host(self) -> "TrainedModel":
        """The engine in which this model computes: this object itself."""
        return self

    def __call__(self, *args, **kwargs):
        """The module's forward pass."""
        return self.ds_engine(*args, **kwargs)

    def inferring(self) -> contextlib.AbstractContextManager:
        """A context for forward passes without gradients (all ranks enter it together). At stage 3, if memory allows,
        weights are gathered once for all of them, or not at all if the copy has them."""
        return self.inference_gather.gathered(self._copied())

    def _copied(self) -> nn.Module | None:
        return None if self.copy is None else self.copy.current_module()

    def on_device(self) -> contextlib.AbstractContextManager:
        """Does nothing: the weights of a trained model are always on the device."""
        return contextlib.nullcontext()

    def accumulating(self, passes: int) -> contextlib.AbstractContextManager:
        """A context for this many forward and backward passes before the next optimizer step (all ranks enter it
        together). At stage 3, if memory allows, weights are gathered once for all passes, and gradients are reduced in
        the last pass only (`TrainingGather`)."""
        return self.training_gather.gathered(passes, not self._passes, self._copied())

    @traced("{0.role} backward")
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`, which is this rank's share of the mean over all ranks.

        Args:
            loss: scalar tensor, this rank's loss sum divided by the count over *all* ranks and micro-batches. DeepSpeed
                averages gradients over ranks; the factor world_size makes the average a sum.
            last: whether this is the last pass before the optimizer step; gradients are then reduced over ranks.
        """
        # "managed_gradient_accumulation": false is no alternative: stages 0 and 1 then reduce gradients inside step(),
        # where overflows and gradient norms cannot be checked before the weights change.
        self.training_gather.before_backward()
        self._passes += 1
        self.ds_engine.set_gradient_accumulation_boundary(last)
        factor = distributed.world_size() * self._by_stage.loss_factor
        self.ds_engine.backward(loss * factor, scale_wrt_gas=False)

    def overflowed(self) -> bool:
        """Whether a gradient is infinite or NaN on any rank, after the last backward pass."""
        return self._by_stage.overflowed()

    @traced("{0.role} optimizer step")
    def step(self, lr: float, overflow: bool = False, skip: bool = False) -> bool:
        """Make one optimizer step with the learning rate `lr`; returns whether the weights changed.

        If a parameter group has an "lr_ratio", its learning rate is `lr` times this ratio.

        Args:
            overflow: the result of `overflowed`. In fp16 an overflow lowers the loss scale and drops the gradients.
            skip: whether to drop the gradients in any case, because the other model overflowed or the mini-batch is
                left out.

        Raises: RunStopped after FLOOR_OVERFLOWS overflows in a row that did not lower the loss scale.
        """
        for group in self.ds_engine.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        return self._step(overflow, skip)

    def step_roles(self, lrs: Mapping[str, float], overflow: bool = False, skip: bool = False) -> bool:
        """As `step`, with the learning rate given as {role: rate}. An engine of several models takes a rate for each
        model."""
        return self.step(lrs[self.role], overflow, skip)

    def _step(self, overflow: bool, skip: bool) -> bool:
        """As `step`, with the learning rates that are already set in the optimizer's groups."""
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
                f"its floor, {scale:g}, so nothing more is learned. Look at the losses and gradient norms of earlier "
                "steps, and lower the learning rates. bf16 and fp32 do not overflow so early.",
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
        """Whether these tensors are finite in the compute dtype on all ranks (all ranks call this together)."""
        limit = torch.finfo(torch.float16 if self.scales_loss else torch.float32).max
        ends = [torch.stack(torch.aminmax(shard)) for shard in shards if shard.numel()]
        bad = ~(torch.stack(ends).abs() <= limit).all() if ends else False  # a comparison with NaN is false
        return not distributed.any_rank(bad)

    @contextlib.contextmanager
    def exchanged(self, masters: list[Tensor], shards: list[Tensor]) -> Iterator[None]:
        """As `swapped`, for the given master weights."""
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
    """A model that does not learn, in an engine of its own. offload: whether the model's weights are in host memory
    outside of the context `on_device`; this works at stage 0 only."""

    def __init__(self, module: nn.Module, ds_config: dict, offload: bool = False, role: str = "model"):
        module.requires_grad_(False)
        _prepare_stage_3(module, ds_config)
        with own_hpz_groups(ds_config):
            self.ds_engine, *_ = deepspeed.initialize(model=module, config=with_fitting_sizes(module, ds_config))
        self.module: Any = self.ds_engine.module  # a Policy or a Scorer; engine/zero may not import these classes
        self.role = role  # for messages and traces
        self.copy: Copy | None = None
        self.inference_gather = InferenceGather(self.module)
        self.stage = self.ds_engine.zero_optimization_stage()
        self.version = 0  # increases when `take` changes the weights
        self.ds_engine.eval()
        parameters = list(self.module.parameters()) if offload and self.stage == 0 else []
        self._offloaded = list(zip(parameters, copies_in(host_buffer(parameters), parameters)))
        self._leave_device()

    @property
    def host(self) -> "FrozenModel":
        """The engine in which this model computes: this object itself."""
        return self

    @torch.no_grad()
    def __call__(self, *args, **kwargs):
        """The module's forward pass."""
        return self.ds_engine(*args, **kwargs)

    def inferring(self) -> contextlib.AbstractContextManager:
        """As TrainedModel.inferring."""
        return self.inference_gather.gathered()

    def take(self, fetch: Callable[[str], Tensor]) -> None:
        """Replace the weights (all ranks call this together, outside `on_device` if the weights are offloaded). fetch:
        a function from a parameter's name in `module.model` to its new weight, as in `fill_parameters`."""
        fill_parameters(self.module.model, fetch)
        self.version += 1

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Within this context the weights are on the device that computes."""
        for parameter, weights in self._offloaded:
            parameter.data = weights.to(distributed.device(), non_blocking=True)
        try:
            yield
        finally:
            self._leave_device()

    def _leave_device(self) -> None:
        for parameter, weights in self._offloaded:  # the weights have not changed, so nothing is copied back
            parameter.data = weights


class HostedRole:
    """A model that computes in the engine of another model. It has the interface of a TrainedModel or FrozenModel.

    Args:
        host: the other model's engine. Its module can compute in this model's role (`Backbone.select_role`).
    """

    def __init__(self, host: TrainedModel, role: str):
        self.host, self.role = host, role

    @property
    def module(self) -> Any:
        """The Policy or Scorer of this role, as a view of the host's module."""
        return self.host.module.as_role(self.role)

    @property
    def stage(self) -> int:
        """The host's ZeRO stage."""
        return self.host.stage

    def __call__(self, *args, **kwargs):
        """The forward pass of the host's module in this role."""
        return self.host(*args, role=self.role, **kwargs)

    def inferring(self) -> contextlib.AbstractContextManager:
        """As TrainedModel.inferring."""
        return self.host.inferring()

    def on_device(self) -> contextlib.AbstractContextManager:
        """Does nothing: the weights of a trained model are always on the device."""
        return self.host.on_device()


class FrozenRole(HostedRole):
    """A frozen model in the engine of a trained model. It computes with the trained model's weights, but without the
    adapters, or with frozen copies of the layers that train.

        reference = FrozenRole(actor, "reference")
        logprobs, _ = reference(sequences, attention_mask, position_ids, response_length=8)

    A FrozenRole has the interface of a FrozenModel. role: "reference" or "reward".
    """

    @torch.no_grad()
    def __call__(self, *args, **kwargs):
        """The forward pass of the host's module in this role."""
        return super().__call__(*args, **kwargs)


def _prepare_stage_3(module: nn.Module, ds_config: dict) -> None:
    """Make ZeRO-3 gather and free each decoder layer as a whole, with one hook per layer instead of one hook per
    matrix, unless the DeepSpeed file has a `leaf_module`. Make `state_dict` refuse partitioned weights. Nothing is
    changed at other stages.
    """
    zero = ds_config["zero_optimization"]
    if zero.get("stage") != 3:
        return
    for part in (module, *module.children()):
        part.register_state_dict_pre_hook(_refuse_partitions)
    layers = {type(layer) for layer in decoder_layers(module)}
    if "leaf_module" not in zero and layers:
        set_z3_leaf_modules(module, list(layers))


def _refuse_partitions(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise UserError if `state_dict` would return the empty tensors that stand for partitioned weights, which
    `save_pretrained` and `torch.save` would write. With `keep_vars` it returns the parameters, which can be gathered.
    """
    if not keep_vars and any(is_partitioned(one) and not is_available(one) for one in module.parameters()):
        raise UserError(
            "state_dict(), which save_pretrained calls: ZeRO-3 divides these weights among the ranks, and the tensors "
            "here are empty. PPOTrainer.save_models writes whole models, save_checkpoint what training goes on from."
        )
