"""A model of a LoRA run's restart point: its adapter, and the model with that merged in."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.errors import UserError
from engine.lazy import Lazy
from engine.models.adapter_folders import CLASSIFIER, HEAD, PREFIX, AdapterFolder, read_adapter
from engine.models.adapters import update
from engine.models.deepspeed_chat import is_deepspeed_chat_scorer
from engine.models.fingerprint import fingerprint
from engine.models.loading import load_policy, load_scorer, new_scorer
from engine.models.merging import BASE, merged
from engine.models.places import is_adapter
from engine.optim import is_factor
from engine.safetensors_files import file_order
from training.restarts.layout import CONFIG
from training.restarts.resume_point import ResumePoint

OF_MODELS = ("config.json", "generation_config.json")  # what stands beside a whole model and not beside an adapter


class Tensors(dict[str, Tensor]):
    """Tensors in the order of a file, some of them `Lazy`."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        order = sorted(tensors, key=lambda name: file_order(name, tensors[name].dtype))
        super().__init__({name: tensors[name] for name in order})

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Of one of them."""
        return tuple(self[name].shape), self[name].dtype

    def only(self, names: Sequence[str]) -> "Tensors":
        """Some of them."""
        return Tensors({name: self[name] for name in names})


class AdapterPoint:
    """A model of a restart point that was trained by LoRA.

    Args:
        model: its name, which is its adapter's too.
        tensors: what the point holds of it, by names within the adapted model.
        base: where its frozen weights stand; None for where they stood.

    Raises: UserError where the model has no adapter.
    """

    def __init__(self, point: ResumePoint, model: str, tensors, base: str | None = None):
        self.point, self.model, self.tensors = point, model, tensors
        folder = str(point.folder / CONFIG / model)
        if not is_adapter(folder):
            raise UserError(f"{point.folder} has no adapter of the {model}. Leave --adapter out.")
        self.base, self.config = base, folder

    def adapter(self) -> Tensors:
        """The adapter's weights by peft's names. Raises: UserError where other weights train too."""
        found = {}
        for name in self.tensors:
            if is_factor(name):
                found[f"{PREFIX}{name.removesuffix(f'.{self.model}.weight')}.weight"] = self.tensors[name]
            elif name.startswith(f"{HEAD}."):
                found[f"{PREFIX}{name}"] = self.tensors[name]
            elif self.tensors.is_trained(name):
                raise UserError(
                    f"{self.point.folder}: beside the factors {name} and others train, for which an adapter has no "
                    "place. Leave --adapter out."
                )
        return Tensors(found)

    def merged(self) -> Tensors:
        """The weights of the model with its adapter merged in, matrices when they are asked for.

        Raises: UserError where the model that the run began with is not there, or another one is.
        """
        adapter = self._folder()
        model = self._base(adapter)
        persistent = model.state_dict().keys()
        named = [*model.named_parameters(), *model.named_buffers()]
        found = {name: tensor.detach() for name, tensor in named if name in persistent}
        for name in self.tensors:
            if not is_factor(name):
                found[name.replace(BASE, ".")] = self.tensors[name]
        for name in self.tensors:
            layer, is_a, _ = name.partition(".lora_A.")
            if is_a:  # of a head that is the embedding too, whose matrix is not among the named ones, as well
                found[f"{layer}.weight"] = self._merged(adapter, layer, model.get_submodule(layer))
        return Tensors(found)

    def _merged(self, adapter: AdapterFolder, layer: str, part: Any) -> Tensor:
        weight = part.weight.detach()

        def fill(target: Tensor) -> None:
            a, b = (self.tensors[f"{layer}.lora_{factor}.{self.model}.weight"] for factor in "AB")
            change = update(a, b, adapter.scaling(layer, a.shape[0]), transposed=isinstance(part, Conv1D))
            target.copy_(merged(weight, change))

        return Lazy.of(tuple(weight.shape), weight.dtype, fill)

    def _folder(self) -> AdapterFolder:
        try:
            found = read_adapter(self.config, str(self.point.folder), self.base)
        except UserError as error:
            raise UserError(f"{error} Or say with --base where it stands now.") from None
        assert found is not None
        known = self.point.state["identity"].get(f"frozen weights of the {self.model}")
        now = fingerprint(found.base, str(self.point.folder))
        if None not in (known, now) and known.split()[0] != now:
            raise UserError(
                f"{self.point.folder}: its model {self.model} began with other weights than stand in {found.base}. "
                "Give the model that the run began with: --base."
            )
        return found

    def _base(self, adapter: AdapterFolder) -> PreTrainedModel:
        dtype, what = self.tensors.dtype, str(self.point.folder)
        if is_deepspeed_chat_scorer(adapter.base, what):
            return load_scorer(adapter.base, dtype, what=what).model
        if adapter.config.task_type == CLASSIFIER:
            return new_scorer(adapter.base, dtype, None, None, what=what).model
        return load_policy(adapter.base, dtype, what=what).model
