"""A task's folders of models and files of data: made whole, so that a call that was cut off can be made again."""

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.atomic_files import whole_folder, write_whole
from engine.errors import UserError
from scripts.harness import ROOT


def make(folder: Path, *command: object, last: str = "config.json") -> None:
    """Run a command that makes `folder`, unless it is there; it is there once the command has ended. last: a file that
    the command writes into it.

    Raises: UserError if something else is there; CalledProcessError if the command fails.
    """
    if (folder / last).is_file():
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is there, but has no {last}. Remove it, or give another folder for models.")
    with whole_folder(folder) as partial:
        words = [str(partial if word == folder else word) for word in command]
        subprocess.run(words, cwd=ROOT, check=True)


def read(path: Path) -> list[dict]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: Sequence[dict]) -> None:
    """The records as JSON lines, unless the file is there."""
    write_lines(path, (json.dumps(row) + "\n" for row in rows))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """A file of these lines, unless it is there."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(lines))
