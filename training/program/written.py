"""The list of what this program wrote into an output folder: what --overwrite_output_dir removes, and nothing else.

OUTPUT_DIR/written.json names it before it is made, so that a kill in between leaves nothing that is not listed:

    files       names relative to the folder, with * and ? as in a shell; "samples/after.jsonl"
    models      a model's folder ("." for the output folder itself) and the files that are the model in it

Rank 0 alone keeps it. What stands in the folder and not in the list is somebody else's and stays, also within folders
of the program's. A folder of an older version of the program has no list; then the names that it used are taken, where
its run.json says that a run of this program was there.

The folder, its list too, may be a stranger's: what is removed is found in the folder, not behind links, and then looked
up in the list; no path is made of a name that stands there.
"""

import contextlib
import fnmatch
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine.files import read_text
from engine.json_objects import parsed
from engine.whole_files import PARTIAL, write_whole
from training.reporting.run_record import RUN_FILE
from training.restarts.layout import MANIFEST
from training.restarts.manifest import files_in

WRITTEN_FILE = "written.json"
POINTS = "checkpoints/step_*"
"""Restart points are known by what they hold, since they are renamed when they are set aside."""
OWN_FILES = (WRITTEN_FILE, "run.lock")
KEPT = ".kept"  # the ending that a user's file gets which has a name that the run writes
PRETRAINED = ("critic_pretrained", "critic_pretrained_adapter")
MODEL_FOLDERS = (
    *("actor", "critic", "actor_ema", "actor_adapter", "critic_adapter", "actor_ema_adapter"),
    *PRETRAINED,
    *("adapter", "."),
)
OLD_FILES = (
    "metrics.jsonl",
    RUN_FILE,
    "curves.png",
    "samples/before.jsonl",
    "samples/after.jsonl",
    "samples/after_ema.jsonl",
    "samples/step_[0-9]*.jsonl",
    "profile/step_[0-9]*_rank[0-9]*.json.gz*",
    "tensorboard/events.out.tfevents.*",
    POINTS,
)
OLD_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
_ABOUT = "what this program wrote here: --overwrite_output_dir removes this, and nothing else"
_lock = threading.Lock()
_announced: dict[Path, list[str]] = {}
"""This process's names by folder: where the folder is moved or deleted meanwhile, they are listed in the new one."""


@dataclass
class Written:
    """The list of one folder."""

    folder: Path
    files: list[str] = field(default_factory=list)
    models: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Written":
        """The folder's list; without one, what an older version of the program left there. It may be empty."""
        try:
            found = parsed(read_text(folder / WRITTEN_FILE))
            models = {name: [str(file) for file in files] for name, files in found["models"].items()}
            return cls(folder, [str(name) for name in found["files"]], models)
        except FileNotFoundError:
            return cls._of_older_version(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(folder)  # damaged: nothing is known to be the program's

    @classmethod
    def _of_older_version(cls, folder: Path) -> "Written":
        try:
            if "starts" not in parsed(read_text(folder / RUN_FILE)):
                return cls(folder)
        except (OSError, ValueError, TypeError):
            return cls(folder)
        models = {
            name: sorted(path.name for pattern in OLD_MODEL_FILES for path in (folder / name).glob(pattern))
            for name in MODEL_FOLDERS
            if (folder / name / "config.json").is_file()
        }
        return cls(folder, list(OLD_FILES), models)

    def write(self) -> None:
        """Put the list into the folder; raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": _ABOUT, "files": self.files, "models": self.models}, indent=2)
        write_whole(self.folder / WRITTEN_FILE, text + "\n")

    def has(self, name: str) -> bool:
        """Whether the list names this file; no * or ? in it stands for a /."""
        patterns = (one for one in self.files if one != POINTS and one.count("/") == name.count("/"))
        return name in self.files or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def present(self) -> list[Path]:
        """The files and restart points of the list that stand there, models aside."""
        points = filter(is_point, self.folder.glob(POINTS)) if POINTS in self.files else ()
        return [*(self.folder / name for name in files_in(self.folder) if self.has(name)), *points]

    def model_files(self, names: Iterable[str]) -> set[Path]:
        """What the list names of these models, relative to the folder."""
        return {Path(name, file) for name in names for file in self.models.get(name, ())}


def is_point(path: Path) -> bool:
    """Whether a folder is a restart point of this program's, or was to become one; a link is none."""
    if path.is_symlink() or path.parent.is_symlink() or not path.is_dir():
        return False
    if re.fullmatch(r"step_-?\d+(\.\w+)?", path.name) is None:
        return False
    return path.suffix == PARTIAL or any((path / name).is_file() for name in ("trainer_state.json", MANIFEST))


def kept_place(path: Path) -> Path:
    """Where a user's file goes whose name the run writes: NAME.kept, or what is free behind that."""
    while os.path.lexists(path := path.with_name(path.name + KEPT)):
        pass
    return path


def announce(folder: Path, *names: str) -> None:
    """List what is about to be made in the folder. A file of that name that is not listed is the user's: it is renamed.

    Raises: OSError.
    """
    with _lock:
        announced = _announced.setdefault(folder, [])
        listed = Written.read(folder)
        for name in set(names) - set(announced) - set(listed.files):
            path = folder / name
            if not set(name) & set("*?[") and path.is_file() and not listed.has(name):
                path.rename(kept_place(path))
        announced += [name for name in names if name not in announced]
        new = [name for name in announced if name not in listed.files]
        if new:
            listed.files += new
            listed.write()


def list_model(folder: Path, name: str, files: Iterable[str], only: bool = False) -> list[str]:
    """List the files of the model `name`, beside those listed before or instead of them; returns those.

    Raises: OSError.
    """
    with _lock:
        listed = Written.read(folder)
        before = listed.models.get(name, [])
        after = sorted(set(files) | set(() if only else before))
        if after != before:
            listed.models[name] = after
            listed.write()
        return before


def remove_earlier(folder: Path) -> list[str]:
    """Remove all that the list names but for models, and the folders that are empty then; returns what is left in the
    folder that is neither listed nor a log.

    Raises: OSError.
    """
    listed = Written.read(folder)
    for path in listed.present():
        _remove(path)
        for parent in path.relative_to(folder).parents[:-1]:
            with contextlib.suppress(OSError):
                (folder / parent).rmdir()
    listed.files = []
    _announced.pop(folder, None)
    if folder.is_dir() and (listed.models or (folder / WRITTEN_FILE).exists()):
        listed.write()
    ours = listed.model_files(listed.models)
    left = sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return [str(path) for path in left if path not in ours and path.suffix != ".log" and path.name not in OWN_FILES]


def only_begun(folder: Path) -> bool:
    """Whether nothing stands in the folder but what a run of this program listed that came to no model and no restart
    point; logs aside."""
    listed = Written.read(folder)
    present = set(listed.present())
    if any((path / MANIFEST).is_file() for path in present if path.suffix != PARTIAL):
        return False
    for path in folder.rglob("*"):
        own = path.suffix == ".log" or path.name.startswith(OWN_FILES) or path.suffix == PARTIAL
        if not path.is_dir() and not own and not present & {path, *path.parents}:
            return False
    return True


def remove_other_models(folder: Path, kept: Iterable[str]) -> None:
    """Remove the models of the list but for these; their folders too if nothing else is in them. Raises: OSError."""
    with _lock:
        listed = Written.read(folder)
        others = [name for name in listed.models if name not in set(kept)]
        if others:
            remove_files(folder, listed.model_files(others))
            listed.models = {name: files for name, files in listed.models.items() if name not in others}
            listed.write()


def remove_files(folder: Path, names: Iterable[str | Path]) -> None:
    """Remove those of these files that stand in the folder, and the folders in it that are empty then.

    names: relative to the folder, of whoever's making: what leads out of it, or leads through a link, is not found.
    Raises: OSError.
    """
    for name in sorted(files_in(folder) & set(map(str, names))):
        (folder / name).unlink()
        for parent in Path(name).parents[:-1]:
            with contextlib.suppress(OSError):
                (folder / parent).rmdir()


def _remove(path: Path) -> None:
    """Remove a file, or of a restart point what its manifest names; one without a manifest wholly."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        names = list(parsed(read_text(path / MANIFEST))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        shutil.rmtree(path)
        return
    remove_files(path, names)
    (path / MANIFEST).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()
