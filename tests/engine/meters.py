"""Counts of what tensors do: bytes alive at once, and questions of the host to the device.

with LiveBytes(known=model.parameters()) as meter:
    loss(model(...)).backward()
assert meter.peak < 10_000_000
"""

import weakref
from collections.abc import Iterable
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made within this context that are still alive, and the largest that this has been.

    What a kernel allocates for itself and gives back before it returns is not seen. Meta tensors take nothing, and
    tensors that lie in a mapped file, as safetensors reads them, none of a process's own memory.

    known: tensors from before, which are not counted.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.live = self.peak = 0
        self._mapped: list[range] = []  # addresses
        self._seen = WeakIdKeyDictionary()
        for tensor in known:
            self._seen[tensor.untyped_storage()] = True

    def __enter__(self):
        from_file = torch.UntypedStorage.from_file

        def noted(*args, **kwargs):
            storage = from_file(*args, **kwargs)
            addresses = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            self._mapped.append(addresses)
            weakref.finalize(storage, self._mapped.remove, addresses)
            return storage

        self._patch = mock.patch.object(torch.UntypedStorage, "from_file", staticmethod(noted))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        if any(storage.data_ptr() in mapped for mapped in self._mapped):
            return
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, size: int) -> None:
        self.live -= size


class HostQuestions(TorchDispatchMode):
    """How often, within this context, the host waits for the content of a tensor: for a number, a list or a shape."""

    WAITING = (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "equal",
        "_unique2",
        "unique_consecutive",
        "repeat_interleave.Tensor",
    )
    METHODS = ("tolist", "numpy", "cpu")  # on a CPU these are no operations that could be dispatched

    def __init__(self):
        super().__init__()
        self.count = 0
        self.operations = 0  # those that compute or copy: about as many launches on a GPU

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_iter(args[1:2])
        )
        self.count += bool({name, f"{name}.{func._overloadname}"}.intersection(self.WAITING)) or by_mask
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._patches = [mock.patch.object(Tensor, name, self._counted(getattr(Tensor, name))) for name in self.METHODS]
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        for patch in self._patches:
            patch.stop()
        return super().__exit__(*error)

    def _counted(self, method):
        def asked(tensor, *args, **kwargs):
            self.count += 1
            return method(tensor, *args, **kwargs)

        return asked
