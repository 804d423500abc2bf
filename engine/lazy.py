"""Tensors whose numbers are fetched only when they are used, so that a whole model never has to be in host memory."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Lazy(Tensor):
    """A contiguous tensor with a known shape and dtype, whose numbers have not been fetched yet.

    `tensor.copy_(lazy)` fetches the numbers directly into `tensor`. Every other operation first fetches the whole
    tensor again. Libraries can therefore use lazy tensors in dictionaries of tensors, and code that only passes them on
    fetches nothing.
    """

    fill: Callable[[Tensor], None]
    """A function that writes the numbers into a given contiguous tensor of the same shape, with any dtype and on any
    device."""

    @staticmethod
    def of(shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]) -> "Lazy":
        """A lazy tensor of this shape and dtype. fill: a function that writes the numbers into a given tensor."""
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Lazy)
        tensor.fill = fill
        return tensor

    def whole(self) -> Tensor:
        """The whole tensor in host memory."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.fill(whole)
        return whole

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "__get__" or func in _OF_THE_SHAPE:
                return func(*args, **(kwargs or {}))
            if func in (Tensor.contiguous, Tensor.detach):
                return args[0]
            filled = func is Tensor.copy_ and isinstance(args[1], Lazy) and _holds(args[0], args[1])
        if filled:  # outside the context above: filling may itself copy from lazy tensors
            args[1].fill(args[0])
            return args[0]
        args, kwargs = tree_map_only(Lazy, Lazy.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


_OF_THE_SHAPE = {
    getattr(Tensor, name)
    for name in ("dim", "numel", "nelement", "size", "element_size", "is_floating_point", "__len__", "untyped_storage")
}


def _holds(target: Tensor, lazy: Lazy) -> bool:
    return not isinstance(target, Lazy) and target.is_contiguous() and target.shape == lazy.shape
