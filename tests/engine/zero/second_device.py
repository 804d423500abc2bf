"""A second device in pure Python, which shows on a CPU what only an accelerator would.

    with second_device() as seen:  # distributed.device() is DEVICE
        trainer = build_trainer(...)
        trainer.step(prompts)
    assert not seen.mixed and not seen.collectives and seen.waits == {"engine/packing.py micro_batches": 2}

A tensor on DEVICE holds one on the CPU, which computes. What is counted, by the place in the project that asks:

    mixed: operations of tensors on DEVICE and on the CPU, which raise an error on a GPU.
    collectives: collective calls that are given tensors on the CPU, which NCCL refuses.
    waits: questions of the host, which wait until the device has done all that it was given.

To import this file makes the device torch's accelerator for good: a process of the test's own has to do it.
"""

import contextlib
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[3]
OWN = tuple(str(ROOT / folder) for folder in ("engine", "training"))


class _Module(backend_registration._DummyBackendModule):
    """torch.second, as torch.cuda: what activations that are computed again ask of it."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


backend_registration._setup_privateuseone_for_python_backend("second", _Module())
DEVICE = torch.device("second:0")

ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
TAKES_NUMBERS = {"fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_"}  # beside pointwise operations


@dataclass
class Seen:
    """What was counted; `mixed` and `collectives` by operation and the last lines of the project, others by place."""

    mixed: Counter = field(default_factory=Counter)
    collectives: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)

    def forget(self) -> None:
        """Count from zero what is no fault."""
        self.waits.clear()


class OnDevice(Tensor):
    """A tensor on DEVICE; `held`, on the CPU, has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        """The tensor that holds this one."""
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        with torch.inference_mode(held.is_inference()):  # a view is of its base's kind
            made = Tensor._make_wrapper_subclass(cls, held.size(), **layout, device=DEVICE)
        made.held = held
        return made

    @property
    def data(self) -> Tensor:
        """The same numbers, without autograd."""
        return self.detach()

    @data.setter
    def data(self, other: "OnDevice") -> None:
        Tensor.data.__set__(self, other)  # shape and strides
        self.held = other.held

    def __repr__(self) -> str:
        return f"OnDevice({self.held})"

    def tolist(self) -> list:
        """As of any tensor; torch refuses it to classes like this one."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor on {DEVICE}, outside second_device()")


@contextlib.contextmanager
def second_device() -> Iterator[Seen]:
    """A block in which this process computes on DEVICE, and what it asks of it is counted."""
    accelerator = {
        "current_device_name": lambda self: str(DEVICE),
        "device_name": lambda self, index=None: "cpu" if index is None else str(DEVICE),
        "FloatTensor": property(lambda self: partial(torch.tensor, dtype=torch.float32, device=DEVICE)),
        "ByteTensor": property(lambda self: partial(torch.tensor, dtype=torch.uint8, device=DEVICE)),
    }
    seen = Seen()
    _watches.append(_Watch(seen))
    torch.__future__.set_swap_module_params_on_conversion(True)  # optimizers keep the parameters of a module that moves
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=DEVICE) copies where the mode sees it
    try:
        with (
            mock.patch.multiple(type(get_accelerator()), **accelerator),
            mock.patch("torch.utils.swap_tensors", _take_place),
            _watches[-1],
        ):
            yield seen
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(False)
        _watches.pop()


def _number_in_a_list(tensor: OnDevice):
    """What torch.tensor calls for a tensor within a list, where no mode is."""
    _watches[-1].seen.waits[_place()] += 1
    return tensor.held.item()


SWAP = torch.utils.swap_tensors


def _take_place(parameter: Tensor, moved: Tensor) -> None:
    """torch.utils.swap_tensors, by which a module that moves keeps its parameters, without its look at weak references:
    one on the CPU cannot be given `data` on DEVICE, as it would be given CUDA's."""
    if not isinstance(moved, OnDevice):
        SWAP(parameter, moved)
        return
    kept = vars(parameter) | {"held": moved.held, "_is_param": True}
    parameter.__class__, moved.__class__ = moved.__class__, parameter.__class__
    parameter.__dict__.update(kept)
    torch._C._swap_tensor_impl(parameter, moved)


_watches: list["_Watch"] = []
NUMBERS = torch.library.Library("aten", "IMPL")
NUMBERS.impl("_local_scalar_dense", _number_in_a_list, "PrivateUse1")


class _Watch(TorchDispatchMode):
    """Counts, and has the tensors that are held compute."""

    def __init__(self, seen: Seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._can_decompose():  # as inference tensors come; others have been decomposed by autograd
            with self:
                return func.decompose(*args, **kwargs)
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        on_device = any(isinstance(tensor, OnDevice) for tensor in tensors)
        target = kwargs.get("device")
        goes = on_device if target is None else torch.device(target).type == DEVICE.type
        if func.namespace == "c10d":
            self._count_collective(func, tensors)
        elif on_device or goes:
            self._count(func, args, kwargs, tensors, on_device, goes)
        if goes and target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        result = func(*_changed(args, _held), **{name: _changed(value, _held) for name, value in kwargs.items()})
        if func.namespace == "c10d":  # gives back what it was given, and its Work
            return (args[0], *result[1:]) if isinstance(result, (tuple, list)) else result
        written = [_argument(func, place, args, kwargs) for place in _written(func)]
        if written:
            return written[0] if len(written) == 1 else type(result)(written)
        return _changed(result, _on_device) if goes else result

    def _count_collective(self, func, tensors: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        if _called("_object") or name == "barrier":  # torch takes its tensors to where the group's are
            self.seen.waits[_place()] += 1
        elif not all(isinstance(tensor, OnDevice) for tensor in tensors):
            self.seen.collectives[f"{name}: {_lines()}"] += 1

    def _count(self, func, args, kwargs, tensors: list[Tensor], on_device: bool, goes: bool) -> None:
        name, seen = func.overloadpacket.__name__, self.seen
        if name in ("copy_", "_to_copy"):
            source, arrives = (args[0], goes) if name == "_to_copy" else (args[1], isinstance(args[0], OnDevice))
            if isinstance(source, OnDevice) and not arrives:
                seen.waits[_place()] += 1
            return
        indices = [index for index in args[1] or () if index is not None] if name in INDEXES else []
        sized = name in INDEXES or kwargs.get("output_size") is not None
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices) or not (
            sized or ASKS.isdisjoint(func.tags)
        ):
            seen.waits[_place()] += 1
        takes_numbers = torch.Tag.pointwise in func.tags or name in TAKES_NUMBERS
        for tensor in (tensor for tensor in tensors if on_device and not isinstance(tensor, OnDevice)):
            sent = any(tensor is index for index in indices) or (name == "where" and tensor.dim() == 0)
            if not sent and not (takes_numbers and tensor.dim() == 0):
                seen.mixed[f"{name}: {_lines()}"] += 1


def _tensors(value) -> Iterator[Tensor]:
    """The tensors in an argument: operations take lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _changed(value, change: Callable):
    """An argument or a result, with what is in its lists changed."""
    return type(value)(_changed(each, change) for each in value) if isinstance(value, (list, tuple)) else change(value)


def _held(value):
    return value.held if isinstance(value, OnDevice) else value


def _on_device(value):
    return OnDevice(value) if isinstance(value, Tensor) and not isinstance(value, OnDevice) else value


@functools.cache
def _written(func) -> list[int]:
    """The places of the arguments that an operation writes to and returns."""
    returns = [value.alias_info is not None and value.alias_info.is_write for value in func._schema.returns]
    places = [
        place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return places if any(returns) else []


def _argument(func, place: int, args, kwargs):
    return args[place] if place < len(args) else kwargs[func._schema.arguments[place].name]


def _frames() -> Iterator[FrameType]:
    """The project's own, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(OWN):
            yield frame
        frame = frame.f_back


def _file(frame: FrameType) -> str:
    return str(Path(frame.f_code.co_filename).relative_to(ROOT))


def _place() -> str:
    frame = next(_frames(), None)
    return "elsewhere" if frame is None else f"{_file(frame)} {frame.f_code.co_qualname.partition('.<locals>')[0]}"


def _lines() -> str:
    return " < ".join(f"{_file(frame)}:{frame.f_lineno}" for frame in itertools.islice(_frames(), 3))


def _called(part: str) -> bool:
    """Whether a function of torch.distributed with this in its name is under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if part in frame.f_code.co_name and frame.f_code.co_filename.endswith("distributed_c10d.py"):
            return True
        frame = frame.f_back
    return False
