"""One interface for the ZeRO stages (`Stage`), with a class for each of DeepSpeed's optimizers. What each rank holds:

stage 0, fp32           the given optimizer, and all gradients in `parameter.grad`
stage 0, fp16 or bf16   also float32 master weights
stages 1 and 2          a flat shard of master weights, moments and (stage 2) gradients for each parameter group
stage 3                 also only a shard of the model's weights
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from engine import distributed
from engine.zero.gathering import forget_second_copies, own_run
from engine.zero.training_state import Master, Masters, Span, without_gradients


class Stage(Masters, Protocol):
    """The interface to DeepSpeed's optimizers. It covers the time from the last backward pass before an optimizer step
    to the new weights."""

    @property
    def loss_factor(self) -> float:
        """The factor by which every loss has to be multiplied, in addition to the loss scale that DeepSpeed applies."""

    def overflowed(self) -> bool:
        """Whether a gradient is infinite or NaN on any rank. All ranks call this together."""

    def step(self, overflow: bool) -> float:
        """Let DeepSpeed update the weights, or, if fp16 gradients have overflowed, lower the loss scale.

        Returns: the gradient norm before clipping; meaningless after an overflow.
        """

    def drop(self) -> None:
        """Make a step that changes neither weights nor moments, and drops the gradients."""

    def gradients(self) -> list[list[Tensor]]:
        """For each master, this rank's parts of the gradient after the last backward pass, multiplied by the loss
        scale."""

    def forget_gradients(self) -> None:
        """To be called after a step. After that, the gradient of a parameter begins at 0 even if the next backward pass
        does not reach the parameter."""


def stage_of(ds_engine: DeepSpeedEngine) -> Stage:
    """The Stage object for a DeepSpeed engine that has an optimizer."""
    number = ds_engine.zero_optimization_stage()
    if number == 3:
        return Stage3(ds_engine)
    if number in (1, 2):
        return Stage1And2(ds_engine)
    if ds_engine.fp16_enabled() or ds_engine.bfloat16_enabled():
        return Stage0WithMasters(ds_engine)
    return Stage0(ds_engine)


class Stage0:
    """Each rank has all weights and gradients, in float32."""

    replicated = True

    def __init__(self, ds_engine: DeepSpeedEngine):
        self.ds_engine, self.optimizer = ds_engine, ds_engine.optimizer

    @property
    def loss_factor(self) -> float:
        return 1.0

    def overflowed(self) -> bool:
        return _overflowed(self._gradients())

    def step(self, overflow: bool) -> float:
        squares = [gradient.double().pow(2).sum() for gradient in self._gradients()]
        norm = torch.stack(squares).sum().sqrt().item()  # DeepSpeed computes no norm here
        self.ds_engine.step()
        return norm

    def drop(self) -> None:
        with without_gradients(self.optimizer):
            self.ds_engine.step()

    def masters(self) -> list[Master]:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [_whole(parameter, parameter, self.optimizer) for parameter in parameters]

    def gradients(self) -> list[list[Tensor]]:
        return [[p.grad for p in master.parameters if p.grad is not None] for master in self.masters()]

    def forget_gradients(self) -> None:
        """Does nothing: after a step there are no gradients."""

    def loss_scaler(self) -> Any:
        return None

    def refresh_from_masters(self) -> None:
        """Does nothing: the masters are the module's own weights."""

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.ds_engine.module.parameters() if p.grad is not None]


class Stage0WithMasters(Stage0):
    """Each rank has all weights and gradients in 16 bits, and all master weights in float32. Scales the loss in fp16.

    DeepSpeed (0.19.8) divides gradients by the loss scale, but it neither multiplies the loss by the loss scale nor
    removes the loss scale from the gradient norm. Here `loss_factor` multiplies the loss, and `step` corrects the norm.
    """

    def __init__(self, ds_engine: DeepSpeedEngine):
        super().__init__(ds_engine)
        # DeepSpeed allocates Adam's moments by a step on zero gradients. This step is counted and decays the masters;
        # both are undone here.
        self.optimizer.optimizer.state.clear()
        self.optimizer.refresh_fp32_params()

    @property
    def loss_factor(self) -> float:
        return float(self.optimizer.loss_scale)

    def step(self, overflow: bool) -> float:
        with self._loss_scale_kept(overflow):
            self.ds_engine.step()
            return float(self.ds_engine.get_global_grad_norm() or 0.0) / self.loss_factor

    def drop(self) -> None:
        with self._loss_scale_kept(overflow=False), without_gradients(self.optimizer.optimizer):
            self.ds_engine.step()

    def masters(self) -> list[Master]:
        pairs = zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True)
        return [
            _whole(parameter, master, self.optimizer.optimizer)
            for group, masters in pairs
            for parameter, master in zip(group, masters, strict=True)
        ]

    def loss_scaler(self) -> Any:
        scaler = self.optimizer.loss_scale_config
        return scaler if scaler.dynamic_loss_scale else None

    def refresh_from_masters(self) -> None:
        for group, masters in zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                parameter.data.copy_(master.data)

    @contextlib.contextmanager
    def _loss_scale_kept(self, overflow: bool) -> Iterator[None]:
        """Within this context a step does not change the loss scale. The change is made at the end of the context.

        This is needed because DeepSpeed changes the scale before it divides the step's gradients by the scale. With a
        scale that is not dynamic, DeepSpeed does not change the scale, but counts the step.
        """
        scale = self.optimizer.loss_scale_config
        dynamic, scale.dynamic_loss_scale = scale.dynamic_loss_scale, False
        steps = scale.cur_iter
        try:
            yield
        finally:
            scale.dynamic_loss_scale, scale.cur_iter = dynamic, steps
        self.optimizer._update_scale(overflow)


class Stage1And2:
    """Each rank has shards of the float32 masters and of Adam's moments, and at stage 2 of the gradients too."""

    loss_factor = 1.0
    replicated = False

    def __init__(self, ds_engine: DeepSpeedEngine):
        self.ds_engine, self.optimizer = ds_engine, ds_engine.optimizer
        if ds_engine.fp16_enabled():
            # At the smallest scale DeepSpeed would raise an exception after a single overflow, except at stage 0. This
            # program itself decides when to stop.
            self.optimizer.loss_scaler.raise_error_at_min_scale = False

    def overflowed(self) -> bool:
        if self.ds_engine.zero_use_cpu_optimizer():
            return self.optimizer.has_overflow()
        return _overflowed([part for parts in self.gradients() for part in parts])

    def step(self, overflow: bool) -> float:
        # At stages 1 and 2 DeepSpeed would look for an overflow again, with 13 kernels a parameter.
        self.optimizer.check_grad_overflow = overflow
        with self._loss_scale_kept():
            self.ds_engine.step()
        return float(self.ds_engine.get_global_grad_norm() or 0.0)

    def drop(self) -> None:
        put_back = self.ds_engine.zero_use_cpu_optimizer()
        with self._loss_scale_kept(), without_gradients(self.optimizer.optimizer, put_back):
            self.ds_engine.step()

    def masters(self) -> list[Master]:
        """The parameters of a group are concatenated, and rank r holds the r-th part of the result."""
        zero = self.optimizer
        return [
            Master(master, zero.optimizer, parameters, _spans_within(parameters, offsets, len(master)))
            for master, parameters, offsets in zip(
                zero.single_partition_of_fp32_groups,
                zero.round_robin_bit16_groups,
                zero.round_robin_bit16_offsets,
                strict=True,
            )
        ]

    def gradients(self) -> list[list[Tensor]]:
        return [self.optimizer.averaged_gradients[index] for index in range(len(self.masters()))]

    def forget_gradients(self) -> None:
        """Does nothing: after a step there are no gradients."""

    def loss_scaler(self) -> Any:
        return self.optimizer.loss_scaler if self.optimizer.dynamic_loss_scale else None

    def refresh_from_masters(self) -> None:
        self.optimizer.update_lp_params()

    @contextlib.contextmanager
    def _loss_scale_kept(self) -> Iterator[None]:
        """Within this context a step divides its gradients by the loss scale that its loss was multiplied by, although
        DeepSpeed changes the scale before it divides. The changed scale takes effect at the end of the context."""
        if not self.ds_engine.fp16_enabled():
            yield
            return
        self.optimizer.override_loss_scale(self.optimizer.loss_scale)
        try:
            yield
        finally:
            self.optimizer.custom_loss_scaler = False


class Stage3(Stage1And2):
    """Each rank has shards of the weights, in addition to the shards of Stage1And2. Weights are gathered layer by layer
    for forward and backward passes."""

    def overflowed(self) -> bool:
        return self.optimizer.has_overflow()

    def masters(self) -> list[Master]:
        """Each rank has a part of each parameter. A master is the concatenation of this rank's parts, with their
        padding."""
        zero = self.optimizer
        return [
            Master(master, zero.optimizer, parameters, _spans_of_runs(parameters))
            for master, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        ]

    def forget_gradients(self) -> None:
        # The first backward pass of a step overwrites the gradients in this buffer, but only for the parameters that it
        # reaches.
        self.optimizer.grad_partitions_flat_buffer.zero_()

    def refresh_from_masters(self) -> None:
        self.optimizer.checkpoint_event_prologue()  # some parameters may still be gathered, with their old values
        for index in range(len(self.optimizer.fp32_partitioned_groups_flat)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(index)
        forget_second_copies(self.ds_engine.module.parameters())
        self.optimizer.checkpoint_event_epilogue()  # gathers the parameters that stay gathered between uses


def _overflowed(gradients: list[Tensor]) -> bool:
    """Whether a gradient is infinite or NaN on any rank. The host waits once, and few kernels read all gradients."""
    largest = torch.nn.utils.get_total_norm(gradients, math.inf)  # NaN if a gradient is NaN
    return distributed.any_rank(~largest.isfinite())


def _whole(parameter: Any, master: Tensor, adam: torch.optim.Optimizer) -> Master:
    return Master(master, adam, [parameter], [Span(parameter, 0, 0, master.numel())])


def _spans_within(parameters: list[Any], offsets: list[int], size: int) -> list[Span]:
    """The spans in this rank's run of `size` numbers. offsets: the index at which each parameter begins in the
    concatenated runs of all ranks."""
    first, spans = distributed.rank() * size, []
    for parameter, offset in zip(parameters, offsets, strict=True):
        begin, end = max(offset, first), min(offset + parameter.numel(), first + size)
        if begin < end:
            spans.append(Span(parameter, begin - offset, begin - first, end - begin))
    return spans


def _spans_of_runs(parameters: list[Any]) -> list[Span]:
    offset, spans = 0, []
    for parameter in parameters:
        start, length = own_run(parameter)
        if length:
            spans.append(Span(parameter, start, offset, length))
        offset += parameter.ds_tensor.ds_numel
    return spans
