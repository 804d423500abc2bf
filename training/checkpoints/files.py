"""The files of checkpoints: where they are, how they are written and read, and how their completeness is checked.

    OUTPUT_DIR/checkpoints/step_000100/     step_-00005: 5 steps of the critic's pretraining before the first step
        actor/rank_00000.safetensors ...    numbers of the actor's training state, a file for each rank that wrote
        critic/ ema/ reference/             the same for the critic, for the moving average, and for the weights of a
                                            reference that is refreshed, if there are any
        config/actor/ config/critic/        config.json and tokenizer, as beside a saved model
        trainer_state.json                  described in training/checkpoints/conditions.py
        manifest.json                       size and hash of each of these files; written last

A checkpoint is written as step_000100.partial and renamed when it is complete. It becomes step_000100.abandoned when
the run is resumed from an older checkpoint.

Each rank's file holds consecutive parts of flattened tensors. The key of a part is name@start, where start is the index
of the part's first number in the flattened tensor. The files' metadata have the shapes of the whole tensors. The
safetensors library can read these files, but does not write them: the hash has to be computed from the numbers in
memory, not from the file on the disk, and without a second copy of them.

manifest.json: {"format": 1, "step": 100, "files": {"actor/rank_00000.safetensors": [size, blake2b], ...},
                "digest": hash of the other entries}
"""

import hashlib
import json
import os
import re
import socket
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine import distributed
from engine.atomic_files import DTYPES, write_safetensors
from engine.errors import SharedError, UserError
from engine.files import misfit, parsed_json
from engine.models.saving import adapter_files, save_model
from engine.zero.engines import TrainedModel
from engine.zero.training_state import Shard

CHECKPOINTS = "checkpoints"
AUTO = "auto"  # value of --resume: resume from the newest checkpoint in --output_dir, if there is one
STATE_FILE, MANIFEST = "trainer_state.json", "manifest.json"
CONFIG = "config"
EMA = "ema"
REFERENCE = "reference"
PARTIAL = ".partial"
PRUNED = ".pruned"
ABANDONED = ".abandoned"


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return output_dir / CHECKPOINTS / f"step_{step:06d}"


def rank_file(rank: int) -> str:
    """The name of a rank's file of numbers."""
    return f"rank_{rank:05d}.safetensors"


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None if the folder is not named like a checkpoint."""
    match = re.fullmatch(r"step_(-?\d+)", folder.name)
    return int(match[1]) if match else None


def holds_checkpoint(folder: Path) -> bool:
    """Whether a folder, whatever its name, has some of the files of a checkpoint."""
    return any((folder / name).is_file() for name in (MANIFEST, STATE_FILE))


def checkpoints_in(output_dir: Path) -> list[Path]:
    """The folders of checkpoints in a run's output folder, complete or not, in the order of their steps."""
    folder = output_dir / CHECKPOINTS
    if not folder.is_dir():
        return []
    steps = {path: step_of(path) for path in folder.iterdir() if path.is_dir()}
    return sorted((path for path, step in steps.items() if step is not None), key=lambda path: (steps[path], path.name))


def unfinished_in(output_dir: Path) -> list[Path]:
    """The folders of checkpoints that were being written, or being deleted."""
    found = (output_dir / CHECKPOINTS).glob("step_*")
    return sorted(path for path in found if re.fullmatch(rf"step_-?\d+({PARTIAL}|{PRUNED})", path.name))


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint or a model that the run goes on without, so that nobody takes it for the run's; returns its
    new path."""
    names = (folder.with_name(f"{folder.name}{ABANDONED}{number}") for number in ("", *range(2, 10_000)))
    aside = next(name for name in names if not os.path.lexists(name))
    return folder.rename(aside)


CHUNK = 1 << 24  # number of bytes that are written at a time


class FileRecord(NamedTuple):
    """The entry of a file in a manifest: its size in bytes, and the BLAKE2b hash of its content."""

    size: int
    blake2b: str


class _HashedFile:
    """A new file whose content is hashed while it is written. After `finish` the content is on the disk."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)
        self._hash = hashlib.blake2b()
        self._size = 0

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        view = memoryview(data)
        self._hash.update(view)
        self._size += len(view)
        while len(view):
            view = view[self._file.write(view[:CHUNK]) :]

    def finish(self) -> FileRecord:
        """Flush the file to the disk and close it."""
        os.fsync(self._file.fileno())
        return FileRecord(self._size, self._hash.hexdigest())


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a new small file to the disk."""
    with _HashedFile(path) as file:
        file.write(data)
        return file.finish()


def write_shards(path: Path, shards: Sequence[Shard]) -> FileRecord:
    """Write these shards to the disk as a new safetensors file. Shards on a GPU are copied to the host one by one."""
    runs = {f"{shard.name}@{shard.start}": shard.values for shard in shards if shard.values.numel()}
    shapes = {shard.name: shard.shape for shard in shards}
    return write_tensors(path, runs, {"shapes": json.dumps(shapes)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write a new safetensors file to the disk, one tensor at a time. `tensors` may load a tensor only when it is
    read."""
    with _HashedFile(path) as file:
        write_safetensors(file.write, tensors, metadata)
        return file.finish()


class _Run(NamedTuple):
    start: int
    end: int
    file: object
    key: str


class ShardFiles:
    """Reads the tensors whose parts are spread over the files of all ranks in a folder; a `ShardSource`.

    Raises: UserError if there are no such files, or if one of them was not written by `write_shards`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._runs: dict[str, list[_Run]] = defaultdict(list)
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise UserError(f"{folder}: no checkpoint's numbers are there. Give a whole checkpoint.")
        for path in paths:
            try:
                self._open(path)
            except (SafetensorError, KeyError, ValueError) as error:
                raise UserError(f"{path}: no file of a checkpoint ({error}). Use another checkpoint.") from None
        for runs in self._runs.values():
            runs.sort(key=lambda run: run.start)

    def _open(self, path: Path) -> None:
        file = safe_open(str(path), framework="pt", device="cpu")
        shapes = parsed_json((file.metadata() or {})["shapes"])
        if fault := misfit(shapes, {str: [int]}, "shapes"):
            raise ValueError(fault)
        self._shapes.update({name: tuple(shape) for name, shape in shapes.items()})
        for key in file.keys():
            name, _, start = key.rpartition("@")
            (length,) = file.get_slice(key).get_shape()
            self._runs[name].append(_Run(int(start), int(start) + length, file, key))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of the whole tensors."""
        return self._shapes

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (n,), which may be on any device, with n numbers of the flattened tensor `name`, from index
        `start` on.

        Raises: UserError if the files lack some of these numbers.
        """
        place, end = start, start + out.numel()
        for run in self._runs.get(name, ()):
            if run.start <= place < run.end:
                until = min(run.end, end)
                values = run.file.get_slice(run.key)[place - run.start : until - run.start]
                out[place - start : until - start].copy_(values)
                place = until
            if place == end:
                return
        if place < end:
            raise UserError(
                f"{self.folder}: holds no numbers {place} to {end} of {name}. The checkpoint is of another model."
            )

    def whole(self, name: str) -> Tensor:
        """Read the whole tensor of this name into host memory."""
        shape, runs = self._shapes[name], self._runs[name]
        tensor = torch.empty(shape, dtype=self.dtype(name))
        if runs:
            self.read(name, 0, tensor.view(-1))
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        by_name = {text: dtype for dtype, text in DTYPES.items()}
        run = self._runs[name][0]
        return by_name[run.file.get_slice(run.key).get_dtype()]


FORMAT = 1
READ_AT_ONCE = 1 << 24  # number of bytes that are read at a time
LARGEST = 1 << 26  # largest size of a manifest in bytes: enough for hundreds of thousands of files


class Damage(Exception):
    """Raised for a damaged checkpoint. Its text describes the damage."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of manifest.json. step: the step after which the checkpoint was written. files: {path within the
    checkpoint: record of the file}, without the manifest itself."""

    step: int
    files: Mapping[str, FileRecord]

    def text(self) -> str:
        """The text of manifest.json."""
        content = {"format": FORMAT, "step": self.step, "files": {name: list(self.files[name]) for name in self.files}}
        return json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"

    @property
    def size(self) -> int:
        """The size of all files together, in bytes."""
        return sum(record.size for record in self.files.values())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of the checkpoint in `folder`.

        Raises: Damage if the manifest is missing, or differs from what was written. UserError if it has a format that
        this program does not know.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise Damage(f"{MANIFEST} is missing")
        try:
            if path.stat().st_size > LARGEST:
                raise Damage(f"{MANIFEST} is too large for one")
            content = parsed_json(path.read_bytes())
            if content.pop("digest") != _digest(content):
                raise Damage(f"{MANIFEST} is not as it was written")
            if content["format"] != FORMAT:
                raise UserError(
                    f"--resume {folder}: the checkpoint is of format {content['format']!r}, and this version of the "
                    f"program reads format {FORMAT}. Go on with the version that wrote it, or begin anew."
                )
            return cls(content["step"], {name: FileRecord(*record) for name, record in content["files"].items()})
        except OSError as error:
            raise Damage(f"{MANIFEST} cannot be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise Damage(f"{MANIFEST} is not as it was written") from None


def _digest(content: dict) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()


def files_in(folder: Path) -> set[str]:
    """The paths, relative to the folder, of everything below it except folders."""
    found = set()
    for parent, folders, names in os.walk(folder):
        inner = Path(parent)
        links = [name for name in folders if (inner / name).is_symlink()]
        found |= {str((inner / name).relative_to(folder)) for name in (*names, *links)}
    return found


def damages(folder: Path) -> list[str]:
    """Check all files of a checkpoint. Returns a description of each damaged file; [] if the checkpoint is complete
    (all ranks call this).

    Each rank hashes a part of the files; all ranks get the whole result.

    Raises: UserError on all ranks if one of them does not see the folder, or if this program cannot read its format.
    """
    old, found = None, []
    try:
        found = _own_damages(folder)
    except UserError as error:
        old = str(error)
    unseen = None if folder.is_dir() else f"rank {distributed.rank()} on {socket.gethostname()}"
    answers = distributed.all_gather_objects((old, unseen, found))
    for old, unseen, _ in answers:
        if old is not None:
            raise SharedError(old)
        if unseen is not None:
            raise SharedError(
                f"--resume {folder}: not there for {unseen}. Put the checkpoint where every node sees it."
            )
    return list(dict.fromkeys(line for _, _, lines in answers for line in lines))


def _own_damages(folder: Path) -> list[str]:
    try:
        manifest = Manifest.read(folder)
    except Damage as damage:
        return [str(damage)]
    named = step_of(folder)
    if named is not None and named != manifest.step:
        return [f"it is named after step {named} and was written after step {manifest.step}"]
    there = files_in(folder) - {MANIFEST}
    found = [f"{name} is missing" for name in sorted(set(manifest.files) - there)]
    found += [f"{name} does not belong there" for name in sorted(there - set(manifest.files))]
    ranks = distributed.world_size() if distributed.is_initialized() else 1
    by_size = sorted(there & set(manifest.files), key=lambda name: (manifest.files[name].size, name))
    for name in by_size[distributed.rank() % ranks :: ranks]:
        problem = _problem(folder / name, manifest.files[name])
        if problem is not None:
            found.append(f"{name} {problem}")
    return found


def _problem(path: Path, record: FileRecord) -> str | None:
    if not path.is_file():
        return "is no file"
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"has {size} bytes, and was written with {record.size}"
        found = hashlib.blake2b()
        with path.open("rb", buffering=0) as file:
            while data := file.read(READ_AT_ONCE):
                found.update(data)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if found.hexdigest() == record.blake2b else "holds other bytes than were written"


def config_files(models: Mapping[str, TrainedModel], tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """{"MODEL/FILE": content} of the files that a saved model or adapter has in addition to its weights: its
    configuration and the tokenizer."""
    found = {}
    for name, model in models.items():
        found |= {f"{name}/{file}": text.encode() for file, text in adapter_files(model.module).items()}
        with tempfile.TemporaryDirectory() as folder:
            save_model(model.module, {}, tokenizer, folder)
            for path in sorted(Path(folder).iterdir()):
                if path.suffix != ".safetensors":  # all files but the weights
                    found[f"{name}/{path.name}"] = path.read_bytes()
    return found


@dataclass(frozen=True, slots=True)
class Schedule:
    """When checkpoints are written, and which are kept.

    steps: number of steps between two checkpoints; 0 if steps do not matter. minutes: number of minutes between two
    checkpoints; 0 if time does not matter. keep: how many of the newest checkpoints are kept; 0 to keep all. keep_best:
    whether the checkpoint with the best held-out score is kept too. asynchronous: whether training goes on while a
    checkpoint is written.
    """

    steps: int = 0
    minutes: float = 0.0
    keep: int = 0
    keep_best: bool = False
    asynchronous: bool = True

    @property
    def copies(self) -> bool:
        """Whether checkpoints that are due are written from copies of the state in host memory."""
        return self.asynchronous and bool(self.steps or self.minutes or self.keep_best)
