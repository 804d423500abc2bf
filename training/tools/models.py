"""Finds the models that a tool's flags name: folders of models or adapters, output folders of runs, checkpoints, or
names on the Hub.

model = located("ppo", named(["ppo=out/ppo"])["ppo"])       # out/ppo/actor, or the run's newest checkpoint
model = exported(model, Path("somewhere"))                  # from_pretrained opens model.path
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine import distributed
from engine.errors import SharedError, UserError
from engine.files import expanded
from engine.models.model_paths import ADAPTER_CONFIG
from training.checkpoints.files import CONFIG, checkpoints_in, holds_checkpoint, step_of
from training.checkpoints.resuming import Checkpoint
from training.runtime.ranks import checked
from training.tools.export.model_folder import export

OF_RUNS = ("actor", "actor_adapter", "adapter")
"""Names of folders in a run's output folder that may hold its trained policy. If the disk is small, a run saves the
adapter only."""
POLICIES, SCORERS = ("actor", "model"), ("model",)
"""Names of models in checkpoints: of the policy in step 3 and in step 1, and of the reward model in step 2."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a tool's flag names. what: the flag and the model's name, for messages. given: the path in the flag.
    path: the folder from which the model is loaded; the checkpoint's folder if the model is in a checkpoint and is not
    exported yet. parts: the names that the model may have in a checkpoint."""

    name: str
    what: str
    given: str
    path: str
    is_checkpoint: bool = False
    parts: Sequence[str] = POLICIES


def named(given: Sequence[str]) -> dict[str, str]:
    """{name: path} of the models in entries of the form NAME=PATH or PATH. If no name is given, it is the name of the
    folder. Existing paths become absolute.

    Raises: UserError for an empty name or path, and if two models have the same name.
    """
    found: dict[str, str] = {}
    for entry in given:
        name, sign, path = entry.partition("=")
        if not sign or "/" in name or Path(entry).exists():
            name, path = "", entry
        place = expanded(path, "--models")
        if not path.strip() or (sign and not name.strip() and path != entry):
            raise UserError(f"--models {entry!r}: give NAME=PATH, or a path.")
        path = os.path.normpath(place.absolute()) if place.exists() else path
        name = name.strip() or Path(path).name
        if name in found:
            raise UserError(
                f"--models: two models are called {name} ({found[name]} and {path}). Give them names: "
                f"--models one={found[name]} other={path}."
            )
        found[name] = path
    return found


def located(name: str, given: str) -> Model:
    """Find the policy that an entry of --models names: a model's folder, the trained policy in a run's output folder,
    or a checkpoint. Any other path is left as it is; it is checked when it is read."""
    folder, what = Path(given), f"--models {name}"
    if not folder.is_dir() or _is_model(folder):
        return Model(name, what, given, given)
    if step_of(folder) is not None or holds_checkpoint(folder):
        return Model(name, what, given, given, is_checkpoint=True)
    inner = next((folder / place for place in OF_RUNS if _is_model(folder / place)), None)
    if inner is not None:
        return Model(name, what, given, str(inner))
    return Model(name, what, given, given, is_checkpoint=bool(checkpoints_in(folder)))


def _is_model(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG))


def config_of(model: Model) -> str:
    """The folder with the model's configuration and tokenizer. Raises: UserError if the model is in a checkpoint that
    has no policy."""
    if not model.is_checkpoint:
        return model.path
    checkpoints = [Path(model.path), *reversed(checkpoints_in(Path(model.path)))]
    folders = [checkpoint / CONFIG / part for checkpoint in checkpoints for part in model.parts]
    found = next((folder for folder in folders if _is_model(folder)), None)
    if found is None:
        raise UserError(
            f"{model.what} {model.given}: this checkpoint has no policy. Give one of step 1 or 3, or the folder of a "
            "saved model."
        )
    return str(found)


def exported(model: Model, folder: Path) -> Model:
    """The model in a form that can be loaded. If it is in a checkpoint, rank 0 writes it to `folder` (all ranks call
    this).

    Raises: UserError on all ranks if the checkpoint is damaged or has no such model.
    """
    if not model.is_checkpoint:
        return model
    try:
        checkpoint = Checkpoint.find(model.path, str(folder), with_ema=True)
        assert checkpoint is not None, "a path was given"
        if distributed.is_main():
            print("\n".join([*checkpoint.passed_over, f"reads {checkpoint.folder}"]), flush=True)
        part = next((name for name in model.parts if name in checkpoint.state["models"]), model.parts[0])
        checked(lambda: str(export(checkpoint, folder, model=part)))
    except UserError as error:
        raise SharedError(f"{model.what}: {str(error).removeprefix('--resume').lstrip(': ')}") from None
    return replace(model, path=str(folder), is_checkpoint=False)
