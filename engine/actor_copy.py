"""The copy of a partitioned actor that draws responses: a module without ZeRO's hooks, with the actor's weights and its
adapter merged, whole on each rank or divided among a group of ranks (tensor parallelism)."""

from typing import Any

import torch
from torch import nn

from engine import distributed
from engine.distributed import RankGroup
from engine.errors import UserError
from engine.models.policy import Backbone, Policy
from engine.models.saving import merged_weights
from engine.models.tensor_parallel import TensorParallelPlan, bare_model
from engine.trace import traced
from engine.zero.accelerator import on_gpu
from engine.zero.engines import FrozenModel, TrainedModel

Model = TrainedModel | FrozenModel


class ActorCopy:
    """A copy of a model at stage 3, filled bucket by bucket from ZeRO's partitions whenever the model's weights have
    changed. At stages 0 to 2 it is the model's own module.

    If several ranks hold it together, the model within it, `.model`, has to be called with the same rows on all ranks
    of the group.

    Args:
        ranks: the number of neighbouring ranks that hold the copy together. between_steps: what `release_memory` does
            with the copy: "keep" keeps it, "free" frees it.
    """

    def __init__(self, model: Model, ranks: int = 1, between_steps: str = "keep"):
        self.model = model
        self.group = RankGroup(ranks)
        self.between_steps = between_steps
        self._module: Any = None
        self._version: int | None = None  # of the model's weights that the copy holds
        self._plan = TensorParallelPlan(1)

    def module(self) -> Policy:
        """The module with the model's current weights, until the next call (all ranks call this together)."""
        if self.model.stage < 3:
            return self.model.module
        if self._module is None:
            self._module = self._allocated()
        if self._version != self.model.version:
            self._fill()
        return self._module

    def current_module(self) -> nn.Module | None:
        """The module if it has the model's current weights, whole and without an adapter; otherwise None."""
        current = self._version == self.model.version and self.group.size == 1
        return self._module if current and self.model.module.adapters is None else None

    def release_memory(self) -> None:
        """To be called when nothing will be drawn for a while."""
        if self.between_steps == "keep" or self._module is None:
            return
        self._module = self._version = None
        if on_gpu():
            torch.cuda.empty_cache()

    def _allocated(self) -> Policy:
        like, bare = self.model.module, bare_model(self.model.module)
        if self.group.size > 1:
            self._plan = TensorParallelPlan.of(bare, self.group.size)
        module = Policy(self._plan.part(bare, self.group, distributed.device()), like.replaced)
        module.direct_head = like.direct_head
        return module.eval()

    @traced("gather of weights")
    @torch.no_grad()
    def _fill(self) -> None:
        for name, weight in merged_weights(self.model.module):
            self._plan.fill(self._module.model, name, weight, self.group)
            del weight  # frees it before the next bucket is gathered
        buffers = dict(self._module.model.named_buffers())
        for name, buffer in self.model.module.model.named_buffers():
            buffers[name].copy_(buffer)
        self._version = self.model.version


def copies_bytes(module: Backbone, most: int, ranks: int | None = None) -> dict[int, int]:
    """{number of ranks that hold a copy of a model together: its bytes on each of them}, for all divisors of `most`,
    the number of ranks on a machine, into which the model can be divided; or only for `ranks`.

    Raises: UserError, with the reason, if the model cannot be divided among `ranks` ranks.
    """
    bare = bare_model(module)
    width = next(module.parameters()).element_size()
    found = {}
    for size in range(1, most + 1) if ranks is None else (ranks,):
        plan = TensorParallelPlan.of(bare, size) if size > 1 else TensorParallelPlan(1)
        if ranks is not None and (plan.obstacle or most % size):
            reason = plan.obstacle or f"{size} does not divide the number of ranks of a machine, {most}"
            raise UserError(f"--inference_tp_size {ranks}: {reason}.")
        if plan.obstacle is None and most % size == 0:
            found[size] = width * plan.numbers(bare)
    return found
