"""The compared models: how they are called, and the folder or name on the Hub that each is loaded from."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine import distributed
from engine.errors import SharedError, UserError
from engine.files import expanded
from engine.models.places import ADAPTER_CONFIG
from training.checkpoints.export import export
from training.checkpoints.files import CONFIG, holds_point, points_in, step_of
from training.checkpoints.resuming import ResumePoint
from training.runtime import output_folder
from training.runtime.agreement import checked

OF_RUNS = ("actor", "actor_adapter", "adapter")
"""Where the trained model of a run stands in its output folder; an actor's adapter stands alone where disks are
small."""
EXPORTED = "exported"


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its name. given: the path as the flag has it. path: what it is loaded from; of a checkpoint, until
    it is exported, the point. is_point: whether it is one."""

    name: str
    given: str
    path: str
    is_point: bool = False

    @property
    def what(self) -> str:
        """How messages call it, before the path."""
        return f"--models {self.name}"


def named(given: Sequence[str]) -> dict[str, str]:
    """Paths by names: NAME=PATH, or a path whose folder's name it gets. What is there becomes an absolute path.

    Raises: UserError for a name or a path that is none, and where two models have one name.
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
    """Where the model stands that was given: a model's folder itself, within a run's output folder, or a checkpoint.
    What is none of these is left to whoever reads it."""
    folder = Path(given)
    if not folder.is_dir() or _is_model(folder):
        return Model(name, given, given)
    if step_of(folder) is not None or holds_point(folder):
        return Model(name, given, given, is_point=True)
    inner = next((folder / place for place in OF_RUNS if _is_model(folder / place)), None)
    if inner is not None:
        return Model(name, given, str(inner))
    return Model(name, given, given, is_point=bool(points_in(folder)))


def _is_model(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG))


def config_of(model: Model) -> str:
    """The folder with a model's configuration and tokenizer. Raises: UserError for a checkpoint of a critic alone,
    or of another program's."""
    if not model.is_point:
        return model.path
    points = [Path(model.path), *reversed(points_in(Path(model.path)))]
    folders = [point / CONFIG / part for point in points for part in ("actor", "model")]
    found = next((folder for folder in folders if _is_model(folder)), None)
    if found is None:
        raise UserError(
            f"{model.what} {model.given}: no policy's configuration is in this checkpoint. Give a checkpoint of step 1 "
            "or 3, or the folder of a saved model."
        )
    return str(found)


@contextlib.contextmanager
def exported(models: Sequence[Model], output_dir: str) -> Iterator[list[Model]]:
    """Within this context every model can be loaded: checkpoints stand as folders below `output_dir`, which all
    ranks see, and are gone afterwards (all ranks enter it).

    Raises: UserError on all ranks for a checkpoint that is damaged, or of which nothing can be exported.
    """
    folder = Path(output_dir) / EXPORTED
    if distributed.is_main() and any(model.is_point for model in models):
        output_folder.remove_with(folder)  # whoever interrupts this ends the process from another thread
    try:
        yield [_exported(model, folder / str(place)) for place, model in enumerate(models)]
    finally:
        if distributed.is_main():
            shutil.rmtree(folder, ignore_errors=True)


def _exported(model: Model, folder: Path) -> Model:
    if not model.is_point:
        return model
    try:
        point = ResumePoint.find(model.path, str(folder), with_ema=True)
    except UserError as error:
        raise SharedError(f"{model.what}: {str(error).removeprefix('--resume').lstrip(': ')}") from None
    assert point is not None, "a path was given"
    part = "actor" if "actor" in point.state["models"] else "model"
    checked(lambda: str(export(point, folder, model=part)))
    return replace(model, path=str(folder), is_point=False)
