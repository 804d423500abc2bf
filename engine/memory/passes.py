"""The memory that forward and backward passes need beside the weights, found by running them on the meta device.

    with LiveBytes() as live:
        loss = model(tokens).sum()
        loss.backward()
    live.peak        # {"activations": ..., "logits": ...}

A storage that is created within the context counts for as long as something refers to it: tensors that autograd keeps
for the backward pass, intermediate results, gradients. The scratch space of kernels is not counted.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from engine.algo.logprobs import planned_for
from engine.algo.sampling import sample_tokens
from engine.experience import position_ids
from engine.memory.blueprint import Blueprint
from engine.models.policy import Policy
from engine.rollout.cache import SlotCache
from engine.rollout.passes import Passes

SCORED = ("critic", "reward")  # of the roles that one model may have
FEW, MORE = 2, 4
"""Layers with which passes are made of a model with more of one kind."""
_GROUPED = torch.ops.aten._grouped_mm.default


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a pass: their number, and the prompt tokens and response tokens of each."""

    count: int
    prompt: int
    response: int

    @property
    def length(self) -> int:
        """How many tokens a row has."""
        return self.prompt + self.response


@lru_cache(maxsize=256)
def training_pass(model: Blueprint, rows: Rows, role: str | None = None, gpu: int = 0) -> Counter[str]:
    """Bytes of activations and logits at the peak of a forward and backward pass.

    A weight's gradient counts from when it is computed until it is added to the others, as with ZeRO-2 and 3. role: the
    role that it computes as, where one module is several models; None for its own role. gpu: the GPU's bytes; 0 for a
    CPU.
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
    """Bytes of activations and logits at the peak of a forward pass without gradients, with which experience is
    made."""
    model.module.eval()
    with torch.no_grad():
        return _counted(model, lambda: _output(model, rows, role, with_entropy=role is None))


@lru_cache(maxsize=256)
def decoding_passes(model: Blueprint, rows: Rows, slots: int) -> Counter[str]:
    """Bytes at the peak of generation: of reading prompts of full length, and of one token after the longest rows.

    slots: slots of the cache. The cache's own keys and values are not counted.
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
    """The peak of a pass. Where many layers are alike only a few run, since each further layer adds as many bytes as
    the one before."""
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


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors. `kind` is the kind that new tensors count as. `peak` has the bytes of each kind
    at the moment when their sum was largest."""

    def __init__(self, kind: Callable[[Tensor], str] = lambda tensor: "activations"):
        super().__init__()
        self.kind = kind
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._most = self._now = 0
        self._storages: dict[int, tuple[weakref.ref, str, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run the operation, and count the tensors that it made. Where code asks for a tensor's value (mostly whether a
        mask has no padding), the answer is 0, which means no."""
        if function is torch.ops.aten._local_scalar_dense.default:
            return 0
        made = (_experts_product if function is _GROUPED else function)(*args, **(kwargs or {}))
        given = None
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._storages:
                if given is None:
                    given = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
                if id(tensor.untyped_storage()) not in given:  # else a view of what was there before
                    self._count(tensor)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        kind, size = self.kind(tensor), storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda _: self._forget(key)), kind, size
        self.live[kind] += size
        self._now += size
        if self._now > self._most:
            self._most, self.peak = self._now, self.live.copy()

    def _forget(self, key: int) -> None:
        _, kind, size = self._storages.pop(key)
        self.live[kind] -= size
        self._now -= size


def _experts_product(first: Tensor, second: Tensor, *others, **settings) -> Tensor:
    """`torch._grouped_mm`, which the meta device supports for bfloat16 only."""
    return _GROUPED(first.bfloat16(), second.bfloat16(), *others, **settings).to(first.dtype)


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Within this context attention keeps for its backward pass only what a fused kernel keeps: inputs, output and one
    number a row. Torch has no fused kernel for the meta device, and would keep probabilities (rows, heads, tokens,
    tokens) there."""
    own = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = _without_computing  # where models look it up
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = own


def _without_computing(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return _Attention.apply(query, key, value, attn_mask)


class _Attention(torch.autograd.Function):
    """What a fused attention kernel allocates; it computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        *rows, tokens, _ = query.shape
        output = query.new_empty(*rows[:1], tokens, *rows[1:], value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(*rows, tokens, dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)  # torch makes a mask to be added of it, anew in each layer
        ctx.save_for_backward(query, key, value, output, sums, mask)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
