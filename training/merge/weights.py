"""Weights of models' folders by name, and what is merged of them, each computed when it is asked for.

    merged = MergedWeights(stored_weights("sft", "--sft"), [stored_weights("run1/actor", "--trained")], scale=1.3)
    merged["model.embed_tokens.weight"]

No more than one tensor of each model is in memory at a time, in float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from engine.algo.weight_changes import METHODS
from engine.errors import UserError
from engine.lazy import Lazy
from engine.models.adapter_folders import AdapterFolder, read_adapter
from engine.models.adapters import update
from engine.models.classes import LANGUAGE_MODEL, model_class
from engine.models.merging import merged
from engine.models.on_disk import tensors_of
from engine.models.places import base_of
from engine.models.reading import read_config
from engine.models.weight_files import headers, stored_name, weight_files, weights_folder
from engine.safetensors_files import file_order


class MergedWeights(Mapping[str, Tensor]):
    """W_sft + scale * change(W_1 - W_sft, ..., W_n - W_sft), computed in float32, in the dtype that the SFT model has.

    Integers are the SFT model's. One trained model and a scale below 1 lies between the two (WARP's LITI), scale 1 is
    the trained one, and a scale above 1 goes on beyond it.

    trained: by the same names and of the same shapes as sft. method: how several changes become one, of METHODS.
    """

    def __init__(
        self, sft: Mapping[str, Tensor], trained: Sequence[Mapping[str, Tensor]], scale: float, method: str = "linear"
    ):
        self.sft, self.trained, self.scale = sft, trained, scale
        self.change = METHODS[method]

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Of a tensor, before it is computed."""
        return tuple(self.sft[name].shape), self.sft[name].dtype

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        """In host memory. Raises: UserError where numbers are not finite."""
        given = self.sft[name]
        start = torch.empty(given.shape, dtype=given.dtype).copy_(given)
        if not start.dtype.is_floating_point or self.scale == 0.0:
            return start
        base = start.float()
        changes = [torch.empty(base.shape).copy_(model[name]).sub_(base) for model in self.trained]
        found = base.add_(self.change(changes), alpha=self.scale).to(start.dtype)
        if found.numel() and not all(map(torch.isfinite, torch.aminmax(found))):
            raise UserError(
                f"--scales {self.scale:g}: {name} has numbers that are NaN or infinite in {start.dtype}. Look at the "
                "trained models, or give a smaller scale."
            )
        return found

    def __iter__(self) -> Iterator[str]:
        """As the safetensors library orders them."""
        return iter(sorted(self.sft, key=lambda name: file_order(name, self.sft[name].dtype)))

    def __len__(self) -> int:
        return len(self.sft)

    def only(self, names: Sequence[str]) -> "MergedWeights":
        """Some of them."""
        part = MergedWeights({name: self.sft[name] for name in names}, self.trained, self.scale)
        part.change = self.change
        return part


def stored_weights(path: str, what: str, trust_remote_code: bool = False) -> dict[str, Tensor]:
    """The tensors of a model's files by name, each read when it is asked for; of an adapter those of its base, with the
    adapter merged in.

    Raises: UserError, naming `what` (a flag), where there are none on this machine, or a file is broken.
    """
    base = base_of(path, what)
    folder = weights_folder(base)
    if folder is None:
        raise UserError(f"{what} {path}: the weights are not on this machine. Give a folder, or fetch the model first.")
    known = headers(folder, f"{what} {path}")
    found: dict[str, Tensor] = {}
    for file in weight_files(folder, what):
        found |= tensors_of(file)
        for name in known.keys() - found.keys() if file.suffix == ".safetensors" else ():
            with safe_open(file, "pt") as opened:
                if name in opened.keys():
                    found[name] = opened.get_tensor(name)
    others = known.keys() - found.keys()
    if others:
        raise UserError(
            f"{what} {path}: {min(others)} is in a file that cannot be read by pieces. Save the model as safetensors "
            "(from_pretrained, save_pretrained)."
        )
    adapter = read_adapter(path, what)
    return found if adapter is None else _with_adapter(found, adapter, trust_remote_code)


def _with_adapter(stored: dict[str, Tensor], adapter: AdapterFolder, trust_remote_code: bool) -> dict[str, Tensor]:
    config = read_config(adapter.base, adapter.what, trust_remote_code)
    kind = model_class(config, LANGUAGE_MODEL, adapter.base, adapter.what, trust_remote_code)
    with torch.device("meta"):
        model = kind._from_config(config)
    found = dict(stored)
    for layer, (a, b) in adapter.factors().items():
        name = stored_name(f"{layer}.weight", model, stored)
        if name is None:
            raise UserError(
                f"{adapter.what} {adapter.path}: it changes {layer}, which its base {adapter.base} does not hold as a "
                "matrix of its own. Save the merged model as a whole (peft's merge_and_unload), and give that."
            )
        transposed, scaling = isinstance(model.get_submodule(layer), Conv1D), adapter.scaling(layer, a.shape[0])
        fill = partial(_fill_merged, stored[name], a, b, scaling, transposed)
        found[name] = Lazy.of(tuple(stored[name].shape), stored[name].dtype, fill)
    return found


def _fill_merged(matrix: Tensor, a: Tensor, b: Tensor, scaling: float, transposed: bool, target: Tensor) -> None:
    whole = torch.empty(matrix.shape, dtype=matrix.dtype).copy_(matrix)
    target.copy_(merged(whole, update(a.float(), b.float(), scaling, transposed)))
