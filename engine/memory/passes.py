"""What passes through a model need beside its weights: the passes are made, on the meta device, and counted."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from engine.algo.logprobs import planned_for
from engine.algo.sampling import sample_tokens
from engine.experience import position_ids
from engine.memory.blueprint import Blueprint
from engine.memory.live_bytes import LiveBytes, fused_attention
from engine.models.policy import Policy
from engine.rollout.cache import SlotCache
from engine.rollout.passes import Passes

SCORED = ("critic", "reward")  # of the roles that one model may have
FEW, MORE = 2, 4
"""Layers with which passes are made of a model with more of one kind."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a pass: how many, tokens of prompt and of response in each."""

    count: int
    prompt: int
    response: int

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.response


@lru_cache(maxsize=256)
def training_pass(model: Blueprint, rows: Rows, role: str | None = None, gpu: int = 0) -> Counter[str]:
    """Bytes of activations and logits when a forward and backward pass holds most of them.

    A weight's gradient is among them from when it is made to when it is added to the others, as ZeRO-2 and 3 have it.
    role: as what it computes, where it is several models; None for its own. gpu: its bytes; 0 for a CPU.
    """
    hooks = [p.register_post_accumulate_grad_hook(_forget) for p in model.module.parameters() if p.requires_grad]
    model.module.train()
    try:
        with planned_for(gpu):
            return _counted(model, lambda: torch.autograd.backward(_output(model, rows, role).sum()))
    finally:
        for hook in hooks:
            hook.remove()


@lru_cache(maxsize=256)
def scoring_pass(model: Blueprint, rows: Rows, role: str | None = None) -> Counter[str]:
    """The same of a forward pass without gradients, as experience is made with."""
    model.module.eval()
    with torch.no_grad():
        return _counted(model, lambda: _output(model, rows, role, with_entropy=role is None))


@lru_cache(maxsize=256)
def decoding_passes(model: Blueprint, rows: Rows, slots: int) -> Counter[str]:
    """The same of generation: reading prompts of full length, and one token behind the longest ones.

    slots: of the cache, whose keys and values are left out.
    """
    module: Any = model.module.model
    module.eval()
    cache, ids = SlotCache(), _tokens(rows.count, rows.prompt)
    cache.reserve(rows.count, slots)
    with torch.no_grad(), fused_attention():
        passes = Passes(module, cache, slot_masks=True)
        with LiveBytes(), model.shortened(MORE):  # which answers what masks ask of numbers
            passes.prompts(ids[:, :1], ids[:, :1], 0, 1)  # allocates the cache

        def read() -> None:
            _drawn(passes.prompts(ids, torch.ones_like(ids), 0, rows.prompt))

        def one_token() -> None:
            mask = torch.ones(rows.count, slots, dtype=torch.bool, device="meta")
            _drawn(passes.tokens(ids[:, :1], ids[:, :1], mask, 0, min(rows.length, slots) - 1))

        prompts = _counted(model, read)
        try:
            token = _counted(model, one_token)
        except Exception:  # whatever a family trips over that takes masks of two dimensions (`takes_slot_masks`)
            passes.slot_masks = False
            token = _counted(model, one_token)
        return max(prompts, token, key=lambda peak: peak.total())


def _drawn(logits: Tensor) -> None:
    uniforms = torch.empty(len(logits), dtype=torch.float64, device="meta")
    sample_tokens(logits, uniforms)


def _output(model: Blueprint, rows: Rows, role: str | None, with_entropy: bool = False) -> Tensor:
    ids = _tokens(rows.count, rows.length)
    mask = torch.ones_like(ids)
    given = ids, mask, position_ids(mask)
    if isinstance(model.module, Policy) and role not in SCORED:
        return model.module(*given, response_length=rows.response, with_entropy=with_entropy, role=role)[0]
    return model.module(*given, role=role)


def _tokens(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.int64, device="meta")


def _counted(model: Blueprint, run: Callable[[], object]) -> Counter[str]:
    """The peak of a pass. Of many layers that are alike a few run: each further one adds as much as the one before."""
    layers = model.layers_alike
    if layers <= MORE:
        return _peak(model, run)
    with model.shortened(FEW):
        few = _peak(model, run)
    with model.shortened(MORE):
        more = _peak(model, run)
    return Counter({kind: few[kind] + (more[kind] - few[kind]) * (layers - FEW) // (MORE - FEW) for kind in few | more})


def _peak(model: Blueprint, run: Callable[[], object]) -> Counter[str]:
    vocabulary = model.vocabulary

    def kind(tensor: Tensor) -> str:
        return "logits" if tensor.dim() and tensor.shape[-1] == vocabulary else "activations"

    with fused_attention(), LiveBytes(kind) as live:
        run()
    return live.peak


def _forget(parameter: nn.Parameter) -> None:
    parameter.grad = None
