"""Where a model or a data set may stand: a folder or file on this machine, or a name on the Hugging Face Hub.

Transformers is not imported here, so that a name can be looked at before anything large is.
"""

import re
from pathlib import Path

import huggingface_hub

from engine.errors import UserError
from engine.files import parsed_json, refuse_pointers

ADAPTER_CONFIG = "adapter_config.json"
_MODELS = ("config.json", ADAPTER_CONFIG)  # what says that a folder is a model's
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # of which the first is taken, as transformers does
_WHOLE_WEIGHTS = (*WEIGHT_FILES, *(f"{name}.index.json" for name in WEIGHT_FILES))
_WITHIN = ("actor", "reward", "sft", "actor_adapter", "adapter")  # where models stand in folders that runs write


def can_be_hub_name(name: str) -> bool:
    """Whether a name can be one of the Hub: `name`, or `owner/name` where no folder is called like the owner."""
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is None:
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def is_adapter(path: str | Path) -> bool:
    """Whether an adapter of peft's stands at `path`."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def base_of(path: str, what: str) -> str:
    """Where the whole model stands that `path` is loaded from: an adapter's base, or the path itself.

    A base that is no absolute path is looked for from the working directory, as peft does, and from the adapter's
    folder; what is found in neither is a name on the Hub.

    Raises: UserError, naming `what` (a flag), where an adapter names no base or one that cannot be, or stands in the
    folder of a whole model.
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
    """Whether two paths or names are of one model."""
    return one == other or (Path(one).is_dir() and Path(other).is_dir() and Path(one).samefile(other))


def require_model(path: str, what: str) -> None:
    """Raise UserError, naming `what` (a flag), unless `path` is a model's folder or the name of a model on the Hub.

    The Hub is asked once: transformers would ask again and again, for a minute, where no network is.
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
    except Exception as error:  # of the HTTP library's own kinds too, whichever that is
        raise UserError(
            f"{what}: found no folder {path} in {Path.cwd()}, and no model of that name on the Hugging "
            f"Face Hub can be reached ({one_line(error)}). Check the name; without a network, give a local "
            "folder."
        ) from None


def one_line(error: Exception) -> str:
    """A library's complaint in one line: its first, and the second where the first only announces it."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
