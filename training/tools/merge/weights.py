"""Reads the weights of several models, checks that they match, merges them tensor by tensor, and saves the result.

    merged = MergedWeights(stored_weights("sft", "--sft"), [stored_weights("run1/actor", "--trained")], scale=1.3)
    merged["model.embed_tokens.weight"]

At most one tensor of each model is in memory at a time, in float32.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from engine.algo.weight_changes import METHODS
from engine.atomic_files import file_order, whole_folder
from engine.errors import UserError
from engine.lazy import Lazy
from engine.models.adapter_folders import AdapterFolder, read_adapter
from engine.models.adapters import merged, update
from engine.models.config_and_tokenizer import LANGUAGE_MODEL, model_class, read_config
from engine.models.model_paths import base_of, same_model
from engine.models.saving import save_tokenizer
from engine.models.weight_files import headers, listed, stored_name, tensors_of, weight_files, weights_folder
from training.tools.cards import add_merge_card
from training.tools.export.model_folder import write_weights

SFT, TRAINED = "--sft_model_name_or_path", "--trained_model_name_or_path"
TIED_HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of output heads that some files hold although the head is tied to the embedding, which the files hold too."""
MODEL, NOTE = "model", "merged_from.json"
BESIDE = ("config.json", "generation_config.json", "*.py")
"""Files of the SFT model that a merged model's folder needs in addition to weights and tokenizer."""


class MergedWeights(Mapping[str, Tensor]):
    """W_sft + scale * change(W_1 - W_sft, ..., W_n - W_sft), computed in float32 and returned in the SFT model's dtype.

    Integer tensors are taken from the SFT model. With one trained model, scales from 0 to 1 interpolate between the
    models (WARP's LITI), scale 1 is the trained model, and larger scales extrapolate.

    sft: weights of the SFT model. trained: weights of each trained model, with the same names and shapes. method: how
    the changes of several models are combined into one, a key of METHODS.
    """

    def __init__(
        self, sft: Mapping[str, Tensor], trained: Sequence[Mapping[str, Tensor]], scale: float, method: str = "linear"
    ):
        self.sft = sft
        self.trained = trained
        self.scale = scale
        self.method = method

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of a merged tensor, without computing it."""
        return tuple(self.sft[name].shape), self.sft[name].dtype

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        """The merged tensor in host memory. Raises: UserError if its numbers are not finite."""
        given = self.sft[name]
        start = torch.empty(given.shape, dtype=given.dtype).copy_(given)
        if not start.dtype.is_floating_point or self.scale == 0.0:
            return start
        base = start.float()
        changes = [torch.empty(base.shape).copy_(model[name]).sub_(base) for model in self.trained]
        found = base.add_(METHODS[self.method](changes), alpha=self.scale).to(start.dtype)
        if found.numel() and not all(map(torch.isfinite, torch.aminmax(found))):
            raise UserError(
                f"--scales {self.scale:g}: {name} has numbers that are NaN or infinite in {start.dtype}. Look at the "
                "trained models, or give a smaller scale."
            )
        return found

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which the safetensors library writes them."""
        return iter(sorted(self.sft, key=lambda name: file_order(name, self.sft[name].dtype)))

    def __len__(self) -> int:
        return len(self.sft)

    def only(self, names: Sequence[str]) -> "MergedWeights":
        """The merged weights of these names."""
        return MergedWeights({name: self.sft[name] for name in names}, self.trained, self.scale, self.method)


def stored_weights(path: str, what: str, trust_remote_code: bool = False) -> dict[str, Tensor]:
    """{name: tensor} of the tensors in a model's files; each is read when it is used. If the model is an adapter, these
    are the tensors of its base with the adapter merged in.

    what: the flag that gives the path, for messages. Raises: UserError if the weights are not on this machine, or if a
    file is broken.
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
                f"{adapter.what} {adapter.path}: it changes {layer}, but its base {adapter.base} has no separate "
                "matrix for this layer. Save the merged model as a whole (peft's merge_and_unload), and give that."
            )
        transposed, scaling = isinstance(model.get_submodule(layer), Conv1D), adapter.scaling(layer, a.shape[0])
        fill = partial(_fill_merged, stored[name], a, b, scaling, transposed)
        found[name] = Lazy.of(tuple(stored[name].shape), stored[name].dtype, fill)
    return found


def _fill_merged(matrix: Tensor, a: Tensor, b: Tensor, scaling: float, transposed: bool, target: Tensor) -> None:
    whole = torch.empty(matrix.shape, dtype=matrix.dtype).copy_(matrix)
    target.copy_(merged(whole, update(a.float(), b.float(), scaling, transposed)))


def check_paths(sft: str, trained: Sequence[str]) -> None:
    """Raise UserError if a trained model is the SFT model."""
    for path in trained:
        if same_model(path, sft):
            raise UserError(f"{TRAINED} {path}: that is the SFT model itself. Give a model that was trained from it.")


def check_weights(
    sft: tuple[str, dict[str, Tensor]],
    trained: Sequence[tuple[str, dict[str, Tensor]]],
    trust_remote_code: bool = False,
) -> None:
    """Raise UserError unless the weights of all models have the same names and shapes. sft, trained: (path, {name:
    weight}) of each model.

    If the configuration ties the output head to the embedding, and the files have a copy of the head, the copy is
    removed from the weights.
    """
    path, own = sft
    if getattr(read_config(path, SFT, trust_remote_code), "tie_word_embeddings", False):
        for _, weights in (sft, *trained):
            for name in [name for name in weights if name.endswith(TIED_HEADS) and _is_copy(name, weights)]:
                del weights[name]
    for other_path, other in trained:
        missing, added = own.keys() - other.keys(), other.keys() - own.keys()
        if missing or added:
            what = [f"it lacks {listed(sorted(missing))}"] if missing else []
            what += [f"it also has {listed(sorted(added))}"] if added else []
            raise UserError(
                f"{TRAINED} {other_path}: its weights are not those of {SFT} {path} ({'; '.join(what)}). Give models "
                "that were trained from that one, all written by save_pretrained."
            )
        for name in own:
            if own[name].shape != other[name].shape:
                raise UserError(
                    f"{TRAINED} {other_path}: {name} is {_shape(other[name])} there and {_shape(own[name])} in {SFT} "
                    f"{path}. Only models that were trained from one model can be merged."
                )


def check_change(sft: Mapping[str, Tensor], trained: Sequence[tuple[str, Mapping[str, Tensor]]]) -> None:
    """Raise UserError if a trained model has the same weights as the SFT model. Weights are read only until the first
    difference."""
    for path, weights in trained:
        if all((weights[name] == own).all() for name, own in sft.items()):
            raise UserError(f"{TRAINED} {path}: all its weights are those of the SFT model. Give a trained model.")


def _is_copy(head: str, weights: Mapping[str, Tensor]) -> bool:
    """Whether another weight in the same files has the same shape and numbers."""
    own = weights[head]
    return any(name != head and other.shape == own.shape and (other == own).all() for name, other in weights.items())


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "one number"


def save_merged(
    weights: MergedWeights,
    sft: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    source: Mapping[str, object],
    max_shard_size: str,
    trust_remote_code: bool = False,
) -> Path:
    """Write the merged model to `folder`, which must not exist; returns the folder. The folder is written completely or
    not at all.

    sft: path of the SFT model, whose configuration is copied. tokenizer: the SFT model's tokenizer. source: content of
    the file NOTE. Raises: UserError if the folder exists or cannot be written.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already. Move it away, or give another --output_dir.")
    stored = weights_folder(base_of(sft, SFT))
    assert stored is not None, "stored_weights has looked"
    try:
        with whole_folder(folder) as partial:
            write_weights(weights, max_shard_size, partial)
            for pattern in BESIDE:
                for file in stored.glob(pattern):
                    shutil.copyfile(file, partial / file.name)
            if not getattr(read_config(sft, SFT, trust_remote_code), "tie_word_embeddings", False):
                config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
                # The copied file may tie head and embedding, but the saved weights have a head of their own.
                if config.get("tie_word_embeddings", True):
                    text = json.dumps(config | {"tie_word_embeddings": False}, indent=2) + "\n"
                    (partial / "config.json").write_text(text, encoding="utf-8")
            save_tokenizer(tokenizer, partial)
            (partial / NOTE).write_text(json.dumps(dict(source), indent=2) + "\n", encoding="utf-8")
            add_merge_card(partial, source)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}). Make room, or give another folder.") from None
    return folder
