"""The memory that forward and backward passes need in addition to the weights. It is found by running the passes on the
meta device.

    with LiveBytes() as live:
        loss = model(tokens).sum()
        loss.backward()
    live.peak        # {"activations": ..., "logits": ...}

A storage that is created within the context is counted as long as something refers to it. This includes tensors that
autograd keeps for the backward pass, intermediate results, and gradients. The workspaces of kernels are not counted.
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

SCORED = ("critic", "reward")  # the roles that compute scores
FEW, MORE = 2, 4
"""If a model has more than MORE layers, all of one kind, its passes are run with FEW layers and with MORE layers."""
_GROUPED = torch.ops.aten._grouped_mm.default


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a pass: the number of rows, and the number of prompt tokens and response tokens in each row."""

    count: int
    prompt: int
    response: int

    @property
    def length(self) -> int:
        """The number of tokens in a row."""
        return self.prompt + self.response


@lru_cache(maxsize=256)
def training_pass(model: Blueprint, rows: Rows, role: str | None = None, gpu: int = 0) -> Counter[str]:
    """The number of bytes of activations and logits at the peak of a forward and backward pass.

    The gradient of a weight is counted from the moment when it is computed to the moment when it is added to the other
    gradients, as with ZeRO-2 and ZeRO-3. role: the role in which the module computes, if it can compute as several
    models; None for its own role. gpu: the number of bytes of the GPU; 0 for a CPU.
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
    """The number of bytes of activations and logits at the peak of a forward pass without gradients. Such passes
    compute experience."""
    model.module.eval()
    with torch.no_grad():
        return _counted(model, lambda: _output(model, rows, role, with_entropy=role is None))


@lru_cache(maxsize=256)
def decoding_passes(model: Blueprint, rows: Rows, slots: int) -> Counter[str]:
    """The number of bytes at the peak of generation. It is the larger of two peaks: that of a pass over prompts of full
    length, and that of a pass over one token that follows rows of full length.

    slots: the number of slots of the cache. The keys and values in the cache are not counted.
    """
    module: Any = model.module.model
    module.eval()
    cache, ids = SlotCache(), _tokens(rows.count, rows.prompt)
    cache.reserve(rows.count, slots)
    with torch.no_grad(), fused_attention():
        passes = Passes(module, cache, slot_masks=True)
        with LiveBytes(), model.shortened(MORE):  # LiveBytes answers when mask code asks for a tensor's value
            passes.prompts(ids[:, :1], ids[:, :1], 0, 1)  # allocates the cache

        def read() -> None:
            _drawn(passes.prompts(ids, torch.ones_like(ids), 0, rows.prompt))

        def one_token() -> None:
            mask = torch.ones(rows.count, slots, dtype=torch.bool, device="meta")
            _drawn(passes.tokens(ids[:, :1], ids[:, :1], mask, 0, min(rows.length, slots) - 1))

        prompts = _counted(model, read)
        try:
            token = _counted(model, one_token)
        except Exception:  # a family that takes two-dimensional masks may raise anything (`takes_slot_masks`)
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
    """The bytes at the peak of a pass. If a model has many layers of one kind, only a few of them are run, since each
    further layer adds the same number of bytes."""
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
    """Counts the bytes of live tensors. kind: a function that returns the kind under which a new tensor is counted.
    peak: {kind: bytes} at the moment when the sum over all kinds was largest."""

    def __init__(self, kind: Callable[[Tensor], str] = lambda tensor: "activations"):
        super().__init__()
        self.kind = kind
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._most = self._now = 0
        self._storages: dict[int, tuple[weakref.ref, str, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run the operation, and count the tensors that it creates. If code asks for the value of a tensor (mostly
        whether a mask has no padding), it gets 0, which means no."""
        if function is torch.ops.aten._local_scalar_dense.default:
            return 0
        made = (_experts_product if function is _GROUPED else function)(*args, **(kwargs or {}))
        given = None
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._storages:
                if given is None:
                    given = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
                if id(tensor.untyped_storage()) not in given:  # otherwise it is a view of an argument
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
    """Replaces `torch._grouped_mm`, which the meta device supports for bfloat16 only."""
    return _GROUPED(first.bfloat16(), second.bfloat16(), *others, **settings).to(first.dtype)


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Within this context attention keeps for its backward pass only what a fused kernel keeps: inputs, output, and one
    number per row. Torch has no fused kernel for the meta device, where it would keep the attention probabilities,
    (rows, heads, tokens, tokens)."""
    own = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = _without_computing  # the name by which models call it
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = own


def _without_computing(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return _Attention.apply(query, key, value, attn_mask)


class _Attention(torch.autograd.Function):
    """Allocates what a fused attention kernel allocates, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        *rows, tokens, _ = query.shape
        output = query.new_empty(*rows[:1], tokens, *rows[1:], value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(*rows, tokens, dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)  # in each layer torch converts it to a mask that is added
        ctx.save_for_backward(query, key, value, output, sums, mask)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
