"""The memory that forward and backward passes need in addition to the weights. It is found by running the passes on the
meta device.

A storage that is created in a pass is counted as long as something refers to it. This includes tensors that autograd
keeps for the backward pass, intermediate results, and gradients. The workspaces of kernels are not counted.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as meta_settings
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from engine.experience import position_ids
from engine.models import attention
from engine.models.hydra import HydraPolicy
from engine.models.lora import decoder_stack
from engine.models.policy import Policy
from engine.rollout.cache import SlotCache
from engine.rollout.passes import READ_AT_ONCE, Passes
from training.tools.memory.meta_model import MetaModel

POLICIES = (None, "reference")  # the roles that compute log-probs, if the module is a policy
FEW, MORE = 2, 4
_HOST = torch.device("cpu")
_GROUPED = torch.ops.aten._grouped_mm.default


@lru_cache(maxsize=256)
def training_pass(
    model: MetaModel, rows: int, length: int, response: int, role: str | None = None, with_entropy: bool = False
) -> int:
    """The number of bytes at the peak of a forward and backward pass.

    The gradient of a weight is counted from the moment when it is computed to the moment when it is added to the other
    gradients. rows: the number of sequences. length, response: their tokens, and those of their responses. role: the
    role in which the module computes, if it can compute as several models; None for its own role. with_entropy: whether
    the loss has an entropy bonus.
    """
    hooks = [p.register_post_accumulate_grad_hook(_forget) for p in model.module.parameters() if p.requires_grad]
    model.module.train()
    try:
        sizes = rows, length, response
        return _peak(model, lambda: _output(model, *sizes, role, with_entropy).sum().backward(), length)
    finally:
        for hook in hooks:
            hook.remove()


@lru_cache(maxsize=256)
def forward_pass(model: MetaModel, rows: int, length: int, response: int, role: str | None = None) -> int:
    """The number of bytes at the peak of a forward pass without gradients, which computes experience. Arguments: as
    those of `training_pass`."""
    model.module.eval()
    with torch.no_grad():
        return _peak(model, lambda: _output(model, rows, length, response, role, with_entropy=role is None), length)


@lru_cache(maxsize=256)
def prompt_pass(model: MetaModel, rows: int, length: int) -> int:
    """The number of bytes at the peak of the passes that read `rows` prompts of this length. Keys and values are not
    counted."""
    bare = model.module.model.eval()
    cache = SlotCache()
    cache.reserve(rows, length)
    passes = Passes(bare, cache, False)
    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    mask = torch.ones_like(ids)
    with torch.no_grad():
        _counted(lambda: passes.prompts(ids[:, :1], mask[:, :1], 0, 1), 1)  # allocates keys and values
        rows = rows if length <= READ_AT_ONCE else 1  # long prompts are read one after the other
        return _peak(model, lambda: passes.prompts(ids[:rows], mask[:rows], 0, length), length)


def _output(
    model: MetaModel, rows: int, length: int, response: int, role: str | None, with_entropy: bool = False
) -> Tensor:
    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    mask = torch.ones_like(ids)
    given = ids, mask, position_ids(mask)
    if isinstance(model.module, Policy) and role in POLICIES:
        logprobs, entropy = model.module(*given, response_length=response, with_entropy=with_entropy, role=role)
        return logprobs + entropy if entropy.requires_grad else logprobs
    return model.module(*given, role=role)


def _peak(model: MetaModel, run: Callable[[], object], length: int) -> int:
    """The bytes at the peak of a pass over rows of this length. Of a deep model only FEW and MORE layers are run, since
    each further layer adds the same number of bytes."""
    name = None if isinstance(model.module, HydraPolicy) else decoder_stack(model.module.model)
    stack: Any = None if name is None else model.module.model.get_submodule(name)
    if stack is None or len(stack) <= MORE:
        return _counted(run, length)
    whole, peaks = stack._modules, []
    try:
        for layers in (FEW, MORE):
            stack._modules = dict(list(whole.items())[:layers])
            peaks.append(_counted(run, length))
    finally:
        stack._modules = whole
    return peaks[0] + (peaks[1] - peaks[0]) * (len(stack) - FEW) // (MORE - FEW)


def _counted(run: Callable[[], object], length: int) -> int:
    with fused_attention(), meta_settings.patch(meta_nonzero_assume_all_nonzero=True), LiveBytes(length) as live:
        run()
    return live.peak


def _forget(parameter: nn.Parameter) -> None:
    parameter.grad = None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors. peak: the largest number so far. length: the tokens of each row."""

    def __init__(self, length: int = 0):
        super().__init__()
        self.length = length
        self.live = self.peak = 0
        self._storages: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run the operation, and count the tensors that it creates. If code asks for the value of a tensor (mostly
        whether a mask has no padding), it gets 0, which means no. If it asks for the values of several (how many tokens
        the rows have that it packs), it gets the rows' length."""
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            return 0
        if function is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device") == _HOST:
            return torch.full(args[0].shape, self.length)
        made = (_experts_product if function is _GROUPED else function)(*args, **kwargs)
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
        key, size = id(storage), storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda _: self._forget(key)), size
        self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._storages.pop(key)[1]


def _experts_product(first: Tensor, second: Tensor, *others, **settings) -> Tensor:
    """Replaces `torch._grouped_mm`, which the meta device supports for bfloat16 only."""
    return _GROUPED(first.bfloat16(), second.bfloat16(), *others, **settings).to(first.dtype)


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Within this context attention keeps for its backward pass only what a fused kernel keeps: inputs, output, and one
    number per row. Torch has no fused kernel for the meta device, where it would keep the attention probabilities,
    (rows, heads, tokens, tokens). In 16 bits a kernel computes all packed rows."""
    names = {
        (torch.nn.functional, "scaled_dot_product_attention"): _without_computing,  # the name by which models call it
        (attention, "has_kernel"): lambda dtype, *heads: dtype != torch.float32,
        (attention, "_attention_of_rows"): lambda *given: _Attention.apply(*given[:3], None).transpose(1, 2),
    }
    own = {place: getattr(*place) for place in names}
    try:
        for place, function in names.items():
            setattr(*place, function)
        yield
    finally:
        for place, function in own.items():
            setattr(*place, function)


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
