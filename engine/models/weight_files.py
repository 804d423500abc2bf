"""Which tensors a model's folder holds: their names, shapes and dtypes, read from the headers of its weight files."""

import pickle
import zipfile
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import UserError, shortened
from engine.git_lfs import refuse_pointers
from engine.json_objects import parsed
from engine.models.places import WEIGHT_FILES, one_line

FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")


class Header(NamedTuple):
    """What a file says of a tensor: its shape, and its dtype as the file's format calls it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether its numbers are plain floating-point ones, and not integers or quantized."""
        return self.dtype in FLOATS


def weights_folder(path: str) -> Path | None:
    """Where the weight files of the model at `path` stand on this machine: the folder itself, or what was fetched of a
    name on the Hub; None for such a name before it was."""
    if Path(path).is_dir():
        return Path(path)
    config = huggingface_hub.try_to_load_from_cache(path, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        files = weight_files(folder, path)
    except UserError:
        return None
    return folder if all(file.is_file() for file in files) else None


def headers(folder: Path, what: str) -> dict[str, Header]:
    """The tensors in the weight files of a model's folder, by name; no numbers are read.

    Raises: UserError, naming `what` (a flag) and the file, where there is none or one is missing, broken, cut off, or
    not what the index beside it says.
    """
    found: dict[str, dict[str, Header]] = {}
    for file in weight_files(folder, what):
        if not file.is_file():
            raise UserError(
                f"{what}: {file} is not there, of which the index beside it speaks. Copy it too, or write the model "
                "again."
            )
        refuse_pointers([file], what)
        found[file.name] = file_headers(file, what)
    index = _index(folder)
    for name, file_name in _weight_map(index, what).items() if index is not None else ():
        if name not in found[file_name]:
            raise UserError(
                f"{what}: {index} says that {name} is in {file_name}, which holds no such tensor. Write the model "
                "again."
            )
    return {name: header for tensors in found.values() for name, header in tensors.items()}


def file_headers(file: Path, what: str) -> dict[str, Header]:
    """The tensors in one weight file, by name; raises UserError, naming `what` (a flag), where it is broken."""
    return (_of_safetensors if file.suffix == ".safetensors" else _of_pickle)(file, what)


def mapped_tensors(folder: Path, what: str) -> dict[str, Tensor]:
    """The tensors of a model's files by name. The files are mapped: numbers are read when they are asked for.

    Raises: UserError as `headers` does.
    """
    headers(folder, what)
    found: dict[str, Tensor] = {}
    for file in weight_files(folder, what):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as weights:
                found |= {name: weights.get_tensor(name) for name in weights.keys()}
        else:
            found |= torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    return found


def weight_files(folder: Path, what: str) -> list[Path]:
    """The files that a model's weights are read from, whether all of them are there or not.

    Raises: UserError, naming `what` (a flag), where there are none, or the index is broken.
    """
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return [folder / name]
        if (folder / f"{name}.index.json").exists():
            names = _weight_map(folder / f"{name}.index.json", what).values()
            return [folder / file for file in dict.fromkeys(names)]
    raise UserError(
        f"{what}: the folder {folder} holds a config.json but no weights (model.safetensors or pytorch_model.bin, or "
        "the index of several). Was its writing cut off? Write it again."
    )


def file_names(name: str, model: Any) -> tuple[str, ...]:
    """What a weight may be called in files, by its name in a model (or its class): transformers looks for all of
    these."""
    trunk = f"{model.base_model_prefix}."
    older = name.replace("lm_head.", "embed_out.")  # GPT-NeoX's
    return name, name.removeprefix(trunk), f"{trunk}{name}", older


def stored_name(name: str, model: Any, stored: Container[str]) -> str | None:
    """By which of its `file_names` the files have a weight, if they have it. stored: the names in them."""
    return next((other for other in file_names(name, model) if other in stored), None)


def _index(folder: Path) -> Path | None:
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return None
        if (folder / f"{name}.index.json").exists():
            return folder / f"{name}.index.json"
    return None


def _weight_map(index: Path, what: str) -> dict[str, str]:
    """Each tensor's file, by an index."""
    try:
        by_name = parsed(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: str(file) for name, file in by_name.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{what}: {index} is broken ({type(error).__name__}: {error}). It is to say in which file each tensor is; "
            "copy it again, or write the model again."
        ) from None
    outside = [
        file for file in files.values() if Path(file).name != file or not file.endswith(index.name.split(".")[1])
    ]
    if outside or not files:
        raise UserError(
            f"{what}: {index} names {shortened(outside[0]) if outside else 'no file'}, where it is to name weight "
            "files beside it. Write the model again."
        )
    return files


def _of_safetensors(file: Path, what: str) -> dict[str, Header]:
    try:
        with safe_open(file, "pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}
            return {name: Header(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{what}: {file} ({file.stat().st_size} bytes) is a broken safetensors file ({error}). Was its writing cut "
            "off? Copy it again, or write it again."
        ) from None


def _of_pickle(file: Path, what: str) -> dict[str, Header]:
    """Of a file by torch.save; only tensors are unpickled, and nothing in it can run."""
    try:
        state = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{what}: {file} is broken, or holds more than tensors and would run code when it is read. It was not "
            "read. Copy it again, or save the model as safetensors."
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{what}: {file} ({file.stat().st_size} bytes) is broken ({one_line(error)[:200]}). Was its "
            "writing cut off? Copy it again, or write it again."
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(
            f"{what}: {file} holds something else than tensors by their names. Give a model that save_pretrained wrote."
        )
    return {name: Header(tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in state.items()}
