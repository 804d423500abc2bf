"""How many bytes of tensors a computation holds at once, found without memory: on tensors of the meta device.

    with LiveBytes() as live:
        loss = model(tokens).sum()
        loss.backward()
    live.peak        # {"activations": ..., "logits": ...}

What is counted are storages that come into being within the context, for as long as something refers to them: what
autograd keeps for the backward pass, what operations need for a moment, gradients. Kernels' own scratch space is not.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_GROUPED = torch.ops.aten._grouped_mm.default


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors alive. `kind` names what a new tensor is; `peak` has the bytes of each kind at the
    moment when all kinds together were most."""

    def __init__(self, kind: Callable[[Tensor], str] = lambda tensor: "activations"):
        super().__init__()
        self.kind = kind
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._most = self._now = 0
        self._storages: dict[int, tuple[weakref.ref, str, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run the operation, and count what it has made. A question about numbers is answered with 0, which is no:
        whether a mask has no padding, above all."""
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

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor from now on: it is counted elsewhere."""
        if id(tensor.untyped_storage()) in self._storages:
            self._forget(id(tensor.untyped_storage()))


def _experts_product(first: Tensor, second: Tensor, *others, **settings) -> Tensor:
    """`torch._grouped_mm`, which the meta device has of bfloat16 alone."""
    return _GROUPED(first.bfloat16(), second.bfloat16(), *others, **settings).to(first.dtype)


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Within this context attention keeps for its backward pass what a fused kernel keeps: inputs, output and a number
    a row; and not the (rows, heads, tokens, tokens) of probabilities that torch computes on the meta device, for which
    it has no such kernel."""
    own = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = _attention  # where models look it up
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = own


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
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
