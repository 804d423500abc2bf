"""Modules under DeepSpeed: the only file that calls deepspeed.initialize."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from engine import distributed
from engine.errors import RunStopped


class Lender(Protocol):
    """Lends plain modules to compute with; `engine.whole_copies.Replicas`."""

    def of(self, model: "TrainedModel | FrozenModel") -> nn.Module:
        """A module that computes what the model's own does, free of ZeRO's hooks. All ranks call this together."""
        ...


class TrainedModel:
    """A module that learns: forward, backward over micro-batches, one optimizer step, whatever the ZeRO stage.

        for i, batch in enumerate(micro_batches):
            loss_sum = loss(model(...))
            model.backward(loss_sum / count_over_all_ranks, last=i == len(micro_batches) - 1)
        model.step(lr)

    Every rank must run the same number of micro-batches; one that has fewer runs the rest with a loss times 0.
    """

    def __init__(self, module: nn.Module, ds_config: dict, optimizer: torch.optim.Optimizer):
        _gather_by_layer(module, ds_config)
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config)
        self.lender: Lender | None = None
        self.stage = self.engine.zero_optimization_stage()
        self.version = 0  # goes up when the weights change: tells copies of them whether they are stale
        self.grad_norm = 0.0  # of the latest step, before clipping
        self._fp16 = self.engine.fp16_enabled()
        if hasattr(self.engine.optimizer, "fp32_groups"):
            # At stage 0 in 16 bits DeepSpeed allocates Adam's moments by a step on zero gradients. It counts as one,
            # and decays the float32 masters: undo both.
            self.engine.optimizer.optimizer.state.clear()
            self.engine.optimizer.refresh_fp32_params()
        self.engine.train()

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self.engine.module

    def __call__(self, *args, **kwargs):
        """The module's forward pass; without gradients by a module that `lender` lends, if there is one."""
        if self.lender is None or torch.is_grad_enabled():
            return self.engine(*args, **kwargs)
        return _inferred(self.lender.of(self), *args, **kwargs)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Does nothing: a trained model always stands where it computes."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`, this rank's share of the global mean.

        Args:
            loss: scalar; this rank's loss sum divided by the count over *all* ranks and micro-batches. DeepSpeed
                averages gradients over ranks, which the factor world_size undoes.
            last: whether the optimizer step follows; gradients are then reduced over ranks.
        """
        # Not "managed_gradient_accumulation": false, under which stages 0 and 1 reduce inside step(), too late for an
        # overflow or a gradient norm to be looked at before weights change.
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * (distributed.world_size() * self._own_scale()), scale_wrt_gas=False)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients that overflow are a matter of course (fp16) and not a reason to stop."""
        return self._fp16

    def overflowed(self) -> bool:
        """Whether a gradient is infinite or NaN on any rank, after the last backward."""
        optimizer = self.engine.optimizer
        if self.stage == 0:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            return distributed.any_rank(any(not torch.isfinite(gradient).all() for gradient in gradients))
        return type(optimizer).has_overflow(optimizer)  # the class's: `step` puts its verdict over the instance's

    def step(self, lr: float, overflow: bool = False, skip: bool = False) -> bool:
        """Apply one optimizer step at learning rate `lr`; returns whether the weights changed.

        Args:
            overflow: what `overflowed` said; the loss scale is lowered and the gradients are dropped.
            skip: drop the gradients whatever they are, because a partner overflowed or the losses are not wanted.
        """
        optimizer = self.engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        if skip and not self._fp16:
            self._drop_gradients()
            return False
        if self._fp16:
            # DeepSpeed's own way of skipping a step, told the joint verdict; the scale follows this model's alone.
            checker = optimizer.overflow_checker if self.stage == 0 else optimizer
            checker.check = checker.has_overflow = lambda *_, **__: overflow or skip
            # That would change the scale before it divides this step's gradients by it; so it is called afterwards.
            optimizer._update_scale = lambda *_: None
        if self.stage == 0 and not self._fp16 and not self.engine.bfloat16_enabled():
            squares = [p.grad.double().pow(2).sum() for p in self.module.parameters() if p.grad is not None]
            self.grad_norm = torch.stack(squares).sum().sqrt().item()  # DeepSpeed gives none here
            self.engine.step()
        else:
            self.engine.step()
            if not (overflow or skip):
                self.grad_norm = float(self.engine.get_global_grad_norm()) / self._own_scale()
        if self._fp16:
            self._update_loss_scale(overflow)
        self.version += not (overflow or skip)
        return not (overflow or skip)

    def _drop_gradients(self) -> None:
        """Take DeepSpeed through a step in which its Adam does nothing: weights and moments stay bit by bit."""
        optimizer = self.engine.optimizer
        adam = getattr(optimizer, "optimizer", optimizer)
        own = vars(adam).get("step")  # None where it is the class's
        adam.step = lambda *_, **__: None
        try:
            self.engine.step()
        finally:
            if own is None:
                del adam.step
            else:
                adam.step = own

    def _update_loss_scale(self, overflow: bool) -> None:
        optimizer = self.engine.optimizer
        try:
            type(optimizer)._update_scale(optimizer, overflow)
        except Exception as error:
            if not overflow:
                raise
            raise RunStopped(
                f"fp16: gradients overflow at the smallest loss scale, {self.loss_scale:g} ({error}). "
                "Look at the loss and the gradient norms of the steps before; bf16 or fp32 have the "
                "range."
            ) from None

    def _own_scale(self) -> float:
        """The fp16 loss scale where it is for us to apply: at stage 0 DeepSpeed (0.19.8) divides gradients by it, but
        neither multiplies the loss by it nor takes it out of the gradient norm."""
        return self.loss_scale if self.stage == 0 else 1.0

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale; 1 in other dtypes."""
        return float(self.engine.optimizer.loss_scale) if self._fp16 else 1.0

    def master_shards(self) -> list[Tensor]:
        """This rank's float32 weights: the tensors that the optimizer updates, each on one rank (stage 0: on all)."""
        optimizer = self.engine.optimizer
        if self.stage == 3:
            return [shard.data for shard in optimizer.fp32_partitioned_groups_flat]
        if self.stage in (1, 2):
            return [shard.data for shard in optimizer.single_partition_of_fp32_groups]
        if hasattr(optimizer, "fp32_groups"):
            return [p.data for p in _flat(optimizer.fp32_groups)]
        return [p.data for group in optimizer.param_groups for p in group["params"]]

    @contextlib.contextmanager
    def swapped(self, shards: list[Tensor]) -> Iterator[None]:
        """Within this context the model computes with other float32 weights, given like `master_shards`.

        Both are exchanged in place, so it takes no memory beyond one shard; on leaving all is as before, bit by bit.
        """
        self._exchange(shards)
        try:
            yield
        finally:
            self._exchange(shards)

    @torch.no_grad()
    def _exchange(self, shards: list[Tensor]) -> None:
        for own, other in zip(self.master_shards(), shards, strict=True):
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)
        self._refresh_from_masters()
        self.version += 1

    def _refresh_from_masters(self) -> None:
        """Give the module the weights that its float32 masters hold."""
        optimizer = self.engine.optimizer
        if self.stage == 3:
            optimizer._partition_all_parameters()  # some may still stand gathered, with what they held before
            for index in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        elif self.stage in (1, 2):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp32_groups"):
            for own, master in zip(_flat(optimizer.fp16_groups), _flat(optimizer.fp32_groups)):
                own.data.copy_(master.data)

    def save_checkpoint(self, folder: str, tag: str) -> None:
        """Write weights, optimizer and loss scale (all ranks call this)."""
        self.engine.save_checkpoint(folder, tag=tag)

    def load_checkpoint(self, folder: str, tag: str) -> None:
        """Read back what `save_checkpoint` wrote (all ranks call this); Adam's settings stay those of this run."""
        names = ("betas", "eps", "weight_decay")
        settings = [
            {name: group[name] for name in names if name in group} for group in self.engine.optimizer.param_groups
        ]
        path, _ = self.engine.load_checkpoint(folder, tag=tag)
        assert path is not None, f"DeepSpeed found no checkpoint {tag} in {folder}"
        for group, own in zip(self.engine.optimizer.param_groups, settings, strict=True):
            group.update(own)
        self.version += 1


class FrozenModel:
    """A module that only computes. `offload` at stage 0 keeps it in host memory outside `on_device`."""

    def __init__(self, module: nn.Module, ds_config: dict, offload: bool = False):
        module.requires_grad_(False)
        _gather_by_layer(module, ds_config)
        self.engine, *_ = deepspeed.initialize(model=module, config=ds_config)
        self.lender: Lender | None = None
        self.stage = self.engine.zero_optimization_stage()
        self.version = 0
        self._moves = offload and self.stage == 0
        self.engine.eval()
        if self._moves:
            self.module.to("cpu")

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self.engine.module

    @torch.no_grad()
    def __call__(self, *args, **kwargs):
        """The module's forward pass, by a module that `lender` lends if there is one."""
        if self.lender is None:
            return self.engine(*args, **kwargs)
        return _inferred(self.lender.of(self), *args, **kwargs)

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


@torch.inference_mode()
def _inferred(module: nn.Module, *args, **kwargs):
    """The module's forward pass without autograd's bookkeeping, for which ZeRO's hooks are not made."""
    return module(*args, **kwargs)


def _gather_by_layer(module: nn.Module, ds_config: dict) -> None:
    """Have ZeRO-3 fetch and free whole decoder layers: one hook and one gather each, not one for every matrix.

    A file that names its own `leaf_module` is left to it.
    """
    zero = ds_config["zero_optimization"]
    names = set(getattr(getattr(module, "model", None), "_no_split_modules", None) or [])
    layers = {type(part) for part in module.modules() if type(part).__name__ in names}
    if zero.get("stage") == 3 and "leaf_module" not in zero and layers:
        set_z3_leaf_modules(module, list(layers))


def _flat(groups) -> list:
    return [item for group in groups for item in group]
