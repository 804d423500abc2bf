"""Run by ranks: the look at the output folder, with eyes open and, on rank 1, shut."""

from pathlib import Path

from engine import distributed
from engine.errors import UserError
from training.program import shared_folder


def looked(folder: str) -> tuple[str | None, str | None, list[str]]:
    """What is raised of a folder that all see, and of one that rank 1 does not see; and what is left there."""
    shared = _raised(f"{folder}/new/out")
    shared_folder.PATIENCE = 0.5
    if distributed.rank() == 1:
        shared_folder.os.path.lexists = lambda path: False
    apart = _raised(f"{folder}/new/out")
    distributed.barrier()
    return shared, apart, [path.name for path in Path(folder).iterdir()]


def _raised(output_dir: str) -> str | None:
    try:
        shared_folder.check_shared(output_dir)
    except UserError as error:
        return str(error)
    return None
