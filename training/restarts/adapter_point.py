"""A model of a LoRA run's restart point: its adapter, and the model with that merged in."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.errors import UserError
from engine.lazy import Lazy
from engine.models.adapter_folders import CLASSIFIER, HEAD, PREFIX, AdapterFolder, read_adapter
from engine.models.adapters import update
from engine.models.checking import check_policy, check_trunk, fingerprint
from engine.models.loading import load_policy, load_scorer, new_scorer
from engine.models.places import is_adapter
from engine.models.reading import CLASSIFIER as SCORER
from engine.models.reading import LANGUAGE_MODEL, model_class
from engine.models.reward_formats import is_deepspeed_chat_scorer
from engine.models.saving import BASE, merged
from engine.models.weight_files import stored_name, tensors_of, weight_files, weights_folder
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
        model, base = self._base(adapter)
        found = dict(base)
        for name in self.tensors:
            if not is_factor(name):
                found[name.replace(BASE, ".")] = self.tensors[name]
        places = {weight: name for name, weight in model.named_parameters()}
        for name in self.tensors:
            layer, is_a, _ = name.partition(".lora_A.")
            if is_a:  # of a head that is the embedding too, whose matrix is not among the named ones, as well
                part = model.get_submodule(layer)
                found[f"{layer}.weight"] = self._merged(adapter, layer, base[places[part.weight]], part)
        return Tensors(found)

    def _merged(self, adapter: AdapterFolder, layer: str, weight: Tensor, part: Any) -> Tensor:
        def fill(target: Tensor) -> None:
            a, b = (self.tensors[f"{layer}.lora_{factor}.{self.model}.weight"] for factor in "AB")
            change = update(a, b, adapter.scaling(layer, a.shape[0]), transposed=isinstance(part, Conv1D))
            matrix = torch.empty(weight.shape, dtype=weight.dtype).copy_(weight)
            target.copy_(merged(matrix, change))

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

    def _base(self, adapter: AdapterFolder) -> tuple[PreTrainedModel, dict[str, Tensor]]:
        """The model that the run began with, maybe without memory, and its weights by name.

        They are read when they are asked for, where files name them as the model does; other models are loaded.
        """
        dtype, what = self.tensors.dtype, str(self.point.folder)
        scores = adapter.config.task_type == CLASSIFIER
        if is_deepspeed_chat_scorer(adapter.base, what):
            model = load_scorer(adapter.base, dtype, what=what).model
        else:
            config = (check_trunk if scores else check_policy)(adapter.base, what)
            kind = model_class(config, SCORER if scores else LANGUAGE_MODEL, adapter.base, what)
            config.num_labels = 1 if scores else config.num_labels
            with torch.device("meta"):
                model = kind._from_config(config, dtype=dtype)
            stored = self._stored(model, adapter.base)
            if stored is not None:
                return model, stored
            load = partial(new_scorer, pad_token_id=None, seed=None) if scores else load_policy
            model = load(adapter.base, dtype, what=what).model
        return model, {name: tensor.detach() for name, tensor in _weights(model).items()}

    def _stored(self, model: PreTrainedModel, path: str) -> dict[str, Tensor] | None:
        """The weights of the files at `path` that are not the point's, by their names in the model; None where one of
        them has another name there, or the files are not on this machine."""
        folder = weights_folder(path)
        if folder is None or model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict:
            return None
        files: dict[str, Lazy] = {}
        for file in weight_files(folder, path):
            files |= tensors_of(file)
        own = {name.replace(BASE, ".") for name in self.tensors}
        found = {}
        for name, weight in _weights(model).items():
            other = stored_name(name, model, files)
            if other is not None and (lazy := files[other]).shape == weight.shape:
                found[name] = Lazy.of(tuple(weight.shape), weight.dtype, lazy.fill)
            elif name not in own:
                return None
        return found


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """What is saved of a model, tied weights by one of their names."""
    saved = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in named if name in saved}
