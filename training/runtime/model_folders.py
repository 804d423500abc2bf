"""Saves trained models as Hugging Face folders. An old model is removed only when the new one is whole, so that the
disk has a whole model at every moment.

A model is written to a new folder beside its own (actor.partial) and flushed to the disk; then the two are exchanged.
Steps 1 and 2 save into the output folder itself, which cannot be exchanged: their model is written to model.partial,
the folder is renamed to model.complete, and its files are linked into the output folder one by one. If the process is
killed in between, either the earlier model or model.complete is whole; while files are being linked, the output folder
has no config.json, so that a mixture of two models cannot be loaded.
"""

import errno
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError

from engine import distributed
from engine.atomic_files import PARTIAL, exchange, remove_folder, sync_tree
from engine.errors import RunStopped
from engine.host_memory import releasing_freed_memory
from engine.models.saving import adapter_holds_all, adapter_state, merged_state, save_adapter, save_model
from engine.zero.engines import TrainedModel
from engine.zero.gathering import full_numel, gathered_state
from training.checkpoints.files import set_aside
from training.reporting.run_record import RUN_FILE, record_models, recorded_models
from training.runtime import output_folder
from training.runtime.stopping import note_unwritten, reason_of, unwritten_noted

Written = Callable[[str, Path], None]

ROOM = 1.1  # with "auto", merged models are written if the free space is at least this multiple of their size
PATIENCE, INTERVAL = 600.0, 10.0  # seconds for which a save waits for free space, and seconds between two tries


def save_forms(
    model: TrainedModel,
    tokenizer,
    output_dir: Path,
    name: str,
    merged: bool = True,
    edit: Callable[[dict], None] | None = None,
    written: Written = lambda name, folder: None,
) -> dict[str, Path]:
    """Write a trained model in all wanted forms; returns their folders by name (all ranks call this).

    If the model has an adapter, the adapter is written to the folder `adapter_name(name)`; if `merged` is true, the
    model with the adapter merged in is written to `name`. If weights were trained that an adapter's folder cannot hold,
    only the merged model is written.

    merged: whether a merged model is wanted. Other arguments: see `save`.
    """
    found, adapted = {}, model.module.adapters is not None
    alone = adapted and adapter_holds_all(model.module)
    if alone:
        found[adapter_name(name)] = save(model, tokenizer, output_dir, adapter_name(name), edit, written, adapter=True)
    if merged or not alone:
        found[name] = save(model, tokenizer, output_dir, name, edit, written)
    return found


def adapter_name(name: str) -> str:
    """The name of the folder for the adapter of a model that is saved as `name`."""
    return "adapter" if name == "." else f"{name}_adapter"


def merged_wanted(choice: str, models: Iterable[TrainedModel], output_dir: Path) -> bool:
    """Whether models with adapters are also saved with the adapter merged in (all ranks call this).

    choice: "true", "false", or "auto": true if the disk has room for all merged models. models: the models to save; a
    model that is saved twice is listed twice."""
    if choice != "auto":
        return choice == "true"
    size = sum(
        full_numel(parameter) * parameter.element_size()
        for model in models
        for parameter in model.module.model.parameters()
    )
    place = next(folder for folder in (output_dir, *output_dir.resolve().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    fits = distributed.broadcast_object(free > ROOM * size)
    if not fits and distributed.is_main():
        print(
            f"saved as adapters alone: merged models of {size / 1e9:,.1f} GB have no room in {output_dir}, where "
            f"{free / 1e9:,.1f} GB are free (--save_merged true writes them nevertheless)",
            flush=True,
        )
    return fits


def save(
    model: TrainedModel,
    tokenizer,
    output_dir: Path,
    name: str,
    edit: Callable[[dict], None] | None = None,
    written: Written = lambda name, folder: None,
    adapter: bool = False,
) -> Path:
    """Write a trained model to the folder `name` in the output folder, "." for the output folder (all ranks call this).

    Weights are gathered and written one by one. If the disk is full, the model is written to another place: a temporary
    folder, the home directory or the working directory. If none of these has enough space, saving is retried for ten
    minutes.

    adapter: for a model with an adapter, whether the adapter alone is written; if not, the model with the adapter
    merged in. edit: function that is called with {name: weight} before the weights are written; it may change them.
    written: function that is called on rank 0 with the model's name and the folder into which it was written, before
    that folder gets its final name; files that it adds there belong to the model.

    Returns the folder. Raises: RunStopped on all ranks if no place could be written.
    """
    place, problem = output_dir / name, None
    with releasing_freed_memory(), gathered_state(model.module.model) as lent:
        if distributed.is_main():
            state = (adapter_state if adapter else merged_state)(model.module, lent)
            saves = save_adapter if adapter else save_model
            if edit is not None:
                edit(state)
            try:
                size = sum(weights.numel() * weights.element_size() for weights in state.values())

                def write(folder: Path) -> None:
                    saves(model.module, state, tokenizer, folder)
                    written(name, folder)

                place = _save_somewhere(write, output_dir, name, size)
            except OSError as error:
                problem = f"the trained model {place} cannot be written ({reason_of(error)}), nor could any other place"
    place, problem = distributed.broadcast_object((place, problem))
    if problem is not None:
        raise RunStopped(f"{problem}. A checkpoint has its weights, if the run wrote some (--save_steps).")
    return place


def _save_somewhere(write: Callable[[Path], None], output_dir: Path, name: str, size: int) -> Path:
    """Write a model of `size` bytes to its place, or to another place if the disk is full; returns the folder. Raises:
    OSError if no place could be written within ten minutes."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            _replace(write, output_dir, name)
            return output_dir / name
        except OSError as error:
            note_unwritten(f"{output_dir / name} ({size / 1e6:,.1f} MB)", error)
            failed = error
        for folder in dict.fromkeys((Path(tempfile.gettempdir()), Path.home(), Path.cwd())):
            other = folder / f"trained_model_{uuid.uuid4().hex[:8]}" / (output_dir.name if name == "." else name)
            try:
                _written(write, other)
                print(
                    f"The model stands in {other} instead: move it before that is cleared.", file=sys.stderr, flush=True
                )
                return other
            except OSError:
                shutil.rmtree(other.parent, ignore_errors=True)
        if time.monotonic() > deadline:
            raise failed
        time.sleep(INTERVAL)


def _written(write: Callable[[Path], None], folder: Path) -> None:
    """Write a model into a folder and flush it to the disk. Raises: OSError."""
    try:
        write(folder)
    except SafetensorError as error:  # safetensors raises this if the disk is full
        raise OSError(errno.EIO, str(error)) from None
    sync_tree(folder)


def _replace(write: Callable[[Path], None], output_dir: Path, name: str) -> None:
    """Write a model to a new folder and move it to its place. Raises: OSError; the earlier model then stays."""
    partial = output_dir / ("model" if name == "." else name)
    partial = partial.with_name(partial.name + PARTIAL)
    remove_folder(partial)  # a link that is left in it would be followed
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        _written(write, partial)
        files = [path.name for path in partial.iterdir()]
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if name == ".":
        partial.replace(output_dir / output_folder.COMPLETE)
        output_folder.link_complete(output_dir)
    else:
        old = exchange(partial, output_dir / name)
        if old is not None:
            _keep_others(old, output_dir / name)
    output_folder.model_files[output_dir / name] = files


def _keep_others(old: Path, place: Path) -> None:
    """Remove the old folder of a model whose new folder is in place. Files in it that are no model's are moved to the
    new folder."""
    for path in list(old.iterdir()):
        if not output_folder.WEIGHTS.fullmatch(path.name) and not os.path.lexists(place / path.name):
            path.rename(place / path.name)
    shutil.rmtree(old)


def finish(output_dir: Path, saved: dict[str, Path], step: int) -> None:
    """Called after all models of a run are saved. Lists them in run.json (rank 0 does). Models that the run saved in
    another form, before it was resumed, are renamed to NAME.abandoned.

    saved: {name: folder} of the saved models.

    Nothing is renamed if a model was written to another place because the disk was full.
    """
    if not distributed.is_main():
        return
    with unwritten_noted(output_dir / RUN_FILE):
        if all(place == output_dir / name for name, place in saved.items()):
            for name in recorded_models(output_dir) & {*output_folder.MODEL_FOLDERS} - {*saved}:
                other = output_dir / ("config.json" if name == "." else name)  # without which no model can be loaded
                if other.exists():
                    set_aside(other)
        record_models(output_dir, saved, step)
