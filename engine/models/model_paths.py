"""Paths of models and data sets: a folder or file on this machine, or a name on the Hugging Face Hub.

This file does not import transformers, so that a name can be checked before the slow import.
"""

import re
from pathlib import Path

import huggingface_hub

from engine.errors import UserError
from engine.files import parsed_json, refuse_pointers

ADAPTER_CONFIG = "adapter_config.json"
_MODELS = ("config.json", ADAPTER_CONFIG)  # a folder with one of these is a model's folder
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # the first of these that exists is read, as in transformers
_WHOLE_WEIGHTS = (*WEIGHT_FILES, *(f"{name}.index.json" for name in WEIGHT_FILES))
_WITHIN = ("actor", "reward", "sft", "actor_adapter", "adapter")  # subfolders with models in the output folders of runs


def can_be_hub_name(name: str) -> bool:
    """Whether a name can be a name on the Hub. It has the form `name` or `owner/name`; in the second form no folder on
    this machine may have the owner's name."""
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is None:
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def is_adapter(path: str | Path) -> bool:
    """Whether the folder `path` contains a peft adapter."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def base_of(path: str, what: str) -> str:
    """The path of a whole model: that of the base model if `path` is an adapter, otherwise `path` itself.

    A relative path of a base model is looked up from the working directory, as in peft, and then from the adapter's
    folder. If it exists in neither, it is a name on the Hub.

    Raises: UserError, with the flag `what` in its message, if an adapter names no base model or an impossible one, or
    if the adapter is in the folder of a whole model.
    """
    if not is_adapter(path):
        return path
    file = Path(path) / ADAPTER_CONFIG
    whole = next((name for name in _WHOLE_WEIGHTS if (Path(path) / name).is_file()), None)
    if whole is not None and (Path(path) / "config.json").is_file():
        raise UserError(
            f"{what}: the folder {path} holds a whole model ({whole}) and an adapter ({ADAPTER_CONFIG}), and which of "
            "them is meant cannot be told. Move one into a folder of its own; an adapter that has been merged into "
            "this model can be deleted."
        )
    refuse_pointers([file], what)
    try:
        base = parsed_json(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{what}: {file} is broken ({type(error).__name__}: {error}). Copy it again.") from None
    if not isinstance(base, str) or not base.strip():
        raise UserError(
            f"{what}: {file} does not say of which model it is an adapter (base_model_name_or_path {base!r}). Write "
            "that model's folder or name there."
        )
    for place in (Path(base), Path(path) / base):
        if place.is_dir():
            if is_adapter(place):
                raise UserError(
                    f"{what}: the base of the adapter in {path} is an adapter too ({place}). Merge that one into its "
                    "model with peft (merge_and_unload), and name what you save then as base."
                )
            return str(place)
    if not can_be_hub_name(base):
        raise UserError(
            f"{what}: the base of the adapter in {path} is not there: {base} (base_model_name_or_path of its "
            f"{ADAPTER_CONFIG}). Put the model there, or write where it stands."
        )
    return base


def same_model(one: str, other: str) -> bool:
    """Whether two paths or names refer to the same model."""
    return one == other or (Path(one).is_dir() and Path(other).is_dir() and Path(one).samefile(other))


def require_model(path: str, what: str) -> None:
    """Raise UserError, with the flag `what` in its message, unless `path` is a model's folder or the name of a model on
    the Hub.

    The Hub is asked only once. Without a network, transformers itself would retry for a minute.
    """
    if is_adapter(path):
        require_model(base_of(path, what), f"{what} {path}, an adapter, and its base")
        return
    folder = Path(path)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            refuse_pointers([folder / "config.json", folder / "generation_config.json"], what)
            return
        inner = next((name for name in _WITHIN if any((folder / name / file).is_file() for file in _MODELS)), None)
        raise UserError(
            f"{what}: the folder {path} holds no config.json. Give a folder that save_pretrained wrote"
            f"{f', {folder / inner} for instance' if inner else ''}."
        )
    if not can_be_hub_name(path):
        raise UserError(f"{what}: there is no folder {path} (relative paths start from {Path.cwd()}).")
    if huggingface_hub.constants.HF_HUB_OFFLINE or huggingface_hub.try_to_load_from_cache(path, "config.json"):
        return
    try:
        huggingface_hub.HfApi().model_info(path, timeout=10)
    except Exception as error:  # also the errors of whichever HTTP library is used
        raise UserError(
            f"{what}: found no folder {path} in {Path.cwd()}, and no model of that name on the Hugging "
            f"Face Hub can be reached ({one_line(error)}). Check the name; without a network, give a local "
            "folder."
        ) from None


def one_line(error: Exception) -> str:
    """A library's error message in one line: its first line, and the second if the first only announces it."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
