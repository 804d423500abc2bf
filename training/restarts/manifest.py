"""The manifest of a restart point: what files it has, how large each is and what it hashes to; and whether that is so.

manifest.json: {"format": 1, "step": 100, "files": {"actor/rank_00000.safetensors": [size, blake2b], ...},
                "digest": the hash of the rest}
"""

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine import distributed
from engine.errors import UserError
from training.program.agreement import SharedError
from training.restarts.layout import MANIFEST, step_of
from training.restarts.shard_files import FileRecord

FORMAT = 1
READ_AT_ONCE = 1 << 24  # bytes
LARGEST = 1 << 26  # bytes of a manifest: of hundreds of thousands of files


class Damage(Exception):
    """What is wrong with a restart point."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """step: after which the point was written. files: by their paths within the point, the manifest's own left out."""

    step: int
    files: Mapping[str, FileRecord]

    def text(self) -> str:
        """What manifest.json holds."""
        content = {"format": FORMAT, "step": self.step, "files": {name: list(self.files[name]) for name in self.files}}
        return json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(record.size for record in self.files.values())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """That of the point in `folder`.

        Raises: Damage where it is not there, or not as it was written. UserError where it is of another format.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise Damage(f"{MANIFEST} is missing")
        try:
            if path.stat().st_size > LARGEST:
                raise Damage(f"{MANIFEST} is too large for one")
            content = json.loads(path.read_bytes())
            digest = content.pop("digest")
            if digest != _digest(content):
                raise Damage(f"{MANIFEST} is not as it was written")
            if content["format"] != FORMAT:
                raise UserError(
                    f"--resume {folder}: the restart point is of format {content['format']!r}, and this version of the "
                    f"program reads format {FORMAT}. Go on with the version that wrote it, or begin anew."
                )
            return cls(content["step"], {name: FileRecord(*record) for name, record in content["files"].items()})
        except OSError as error:
            raise Damage(f"{MANIFEST} cannot be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise Damage(f"{MANIFEST} is not as it was written") from None


def _digest(content: dict) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()


def files_in(folder: Path) -> set[str]:
    """Everything below a folder but folders, by its path within it."""
    found = set()
    for parent, folders, names in os.walk(folder):
        inner = Path(parent)
        links = [name for name in folders if (inner / name).is_symlink()]
        found |= {str((inner / name).relative_to(folder)) for name in (*names, *links)}
    return found


def damages(folder: Path) -> list[str]:
    """What is wrong with a restart point, an item a file; [] where it is whole (all ranks call this).

    The files to be hashed are shared out over the ranks; every rank is told of all that was found.

    Raises: UserError on all ranks where one does not see the folder, or where the point is of another format.
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
                f"--resume {folder}: not there for {unseen}. Put the restart point where every node sees it."
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
