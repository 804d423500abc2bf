"""Git LFS pointers: small texts that stand in a clone in the place of large files that were not fetched."""

from collections.abc import Iterable
from pathlib import Path

from engine.errors import UserError
from engine.files import open_file

BEGINNING = b"version https://git-lfs.github.com/spec/v1"


def refuse_pointers(files: Iterable[Path], what: str) -> None:
    """Raise UserError, naming `what` (a flag), if one of the files is a pointer."""
    for file in files:
        problem = lfs_problem(file)
        if problem is not None:
            raise UserError(f"{what}: {problem}")


def lfs_problem(path: str | Path) -> str | None:
    """What the file is and what to do, if it is a pointer; None for any other file, and where none can be read."""
    try:
        with open_file(path) as file:
            beginning = file.read(len(BEGINNING))
    except OSError:
        return None
    if beginning != BEGINNING:
        return None
    return (
        f"{path} is a Git LFS pointer: it stands for a file that was not fetched. Run `git lfs pull` in "
        f"{Path(path).absolute().parent}."
    )
