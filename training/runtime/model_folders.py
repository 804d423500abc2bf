"""Saves trained models as Hugging Face folders that are whole at every instant: old ones go once new ones are whole.

A model is written beside its place (actor.partial), flushed to the disk, and exchanged with the folder there. Steps 1
and 2 save into the output folder itself, which cannot be exchanged: their model is written to model.partial, renamed to
model.complete, and linked from there file by file. A kill in between leaves either the earlier model or model.complete
whole, and the output folder without a config.json, so that no mixture can be loaded.
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
from engine.errors import RunStopped
from engine.host_memory import freed_memory_given_back
from engine.models.saving import adapter_holds_all, adapter_state, merged_state, save_adapter, save_model
from engine.whole_files import PARTIAL, exchange, remove_folder, sync_tree
from engine.zero.engines import TrainedModel
from engine.zero.gathering import full_numel, lent_state
from training.reporting.records import RUN_FILE, record_models
from training.runtime import output_folder
from training.runtime.hub import CARD, add_card, is_edited
from training.runtime.stopping import note_unwritten, reason_of, unwritten_noted

ROOM = 1.1  # merged models are written unasked where the free space is at least this multiple of their size
PATIENCE, INTERVAL = 600.0, 10.0  # seconds that a save waits for space, and between two tries


def save_forms(
    model: TrainedModel,
    tokenizer,
    output_dir: Path,
    name: str,
    merged: bool = True,
    edit: Callable[[dict], None] | None = None,
) -> dict[str, Path]:
    """Write a trained model in all wanted forms; returns their folders by name (all ranks call this).

    Of a model with adapters the adapter is written to the folder `adapter_name(name)`, and the merged model too if it
    is wanted. If weights were trained that an adapter's folder has no place for, only the merged model is written.

    merged: whether a merged model is wanted. The other arguments: see `save`.
    """
    found, adapted = {}, model.module.adapters is not None
    alone = adapted and adapter_holds_all(model.module)
    if alone:
        found[adapter_name(name)] = save(model, tokenizer, output_dir, adapter_name(name), edit, adapter=True)
    if merged or not alone:
        found[name] = save(model, tokenizer, output_dir, name, edit)
    return found


def adapter_name(name: str) -> str:
    """The folder of the adapter of a model that is saved as `name`."""
    return "adapter" if name == "." else f"{name}_adapter"


def merged_wanted(choice: str, models: Iterable[TrainedModel], output_dir: Path) -> bool:
    """Whether models with adapters are saved merged too (all ranks call this).

    choice: "true", "false", or "auto": if the disk has room for all of them. models: each once for each time it is
    saved."""
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
    adapter: bool = False,
) -> Path:
    """Write a trained model to the folder `name` in the output folder, "." for the output folder (all ranks call this).

    Of a model with adapters either its adapter alone is written (adapter), or the model with the adapter merged in.

    Weights are gathered and written one after the other. If the disk is full, the model goes to another place: a
    temporary folder, the home or the working directory. If none of them has the space, saving is retried for ten
    minutes.

    edit: is called with {name: weight} before the weights are written, and may change them.

    Returns the folder. Raises: RunStopped on all ranks if no place could be written.
    """
    place, problem = output_dir / name, None
    with freed_memory_given_back(), lent_state(model.module.model) as lent:
        if distributed.is_main():
            state = (adapter_state if adapter else merged_state)(model.module, lent)
            saves = save_adapter if adapter else save_model
            if edit is not None:
                edit(state)
            try:
                size = sum(weights.numel() * weights.element_size() for weights in state.values())

                def write(folder: Path) -> None:
                    saves(model.module, state, tokenizer, folder)
                    add_card(folder, output_dir, name)

                place = _save_somewhere(write, output_dir, name, size)
            except OSError as error:
                problem = f"the trained model {place} cannot be written ({reason_of(error)}), nor could any other place"
    place, problem = distributed.broadcast_object((place, problem))
    if problem is not None:
        raise RunStopped(f"{problem}. A checkpoint has its weights, if the run wrote some (--save_steps).")
    return place


def _save_somewhere(write: Callable[[Path], None], output_dir: Path, name: str, size: int) -> Path:
    """Write a model of `size` bytes to its place or to another one; returns the place. Raises: OSError after ten
    minutes."""
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
    """Write a model into a folder and put it on the disk; raises OSError."""
    try:
        write(folder)
    except SafetensorError as error:  # safetensors raises this where the disk is full
        raise OSError(errno.EIO, str(error)) from None
    sync_tree(folder)


def _replace(write: Callable[[Path], None], output_dir: Path, name: str) -> None:
    """Write a model and put it to its place; raises OSError, and the earlier model then stays."""
    partial = output_dir / ("model" if name == "." else name)
    partial = partial.with_name(partial.name + PARTIAL)
    remove_folder(partial)  # wholly: what is left there would be written through
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        _written(write, partial)
        files = [path.name for path in partial.iterdir()]
        before = output_folder.list_model(output_dir, name, files)
        if is_edited(output_dir / name / CARD):  # it is the user's by now
            before = [file for file in before if file != CARD]
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if name == ".":
        for file in set(files) - set(before):
            if (output_dir / file).exists():
                (output_dir / file).rename(output_folder.kept_place(output_dir / file))
        partial.replace(output_dir / output_folder.COMPLETE)
        output_folder.link_complete(output_dir)
    else:
        old = exchange(partial, output_dir / name)
        if old is not None:
            _keep_others(old, output_dir / name, before)
    output_folder.list_model(output_dir, name, files, only=True)


def _keep_others(old: Path, place: Path, ours: list[str]) -> None:
    """Remove the folder that a new one has replaced; files in it that no run wrote go into the new one."""
    for path in list(old.iterdir()):
        if path.name not in ours:
            target = place / path.name
            path.rename(output_folder.kept_place(target) if os.path.lexists(target) else target)
    shutil.rmtree(old)


def finish(output_dir: Path, saved: dict[str, Path], step: int, kept: Iterable[str] = ()) -> None:
    """Called after all models of a run are saved: removes those of an earlier run, and lists the saved ones in run.json
    (rank 0 does).

    kept: names of models that the run saved before its end.

    Nothing is removed if a model of this run had to go to another place.
    """
    if not distributed.is_main():
        return
    if all(place == output_dir / name for name, place in saved.items()):
        with unwritten_noted(output_dir):
            output_folder.remove_other_models(output_dir, {*saved, *kept})
    with unwritten_noted(output_dir / RUN_FILE):
        record_models(output_dir, saved, step)
