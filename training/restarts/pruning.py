"""Older restart points are deleted once a newer one is whole; nothing is deleted that the program did not write."""

from collections.abc import Callable
from pathlib import Path

from engine.errors import UserError
from engine.whole_files import remove_folder
from training.restarts.layout import MANIFEST, PRUNED, points_in, step_of
from training.restarts.manifest import Damage, Manifest, files_in


def prune(output_dir: Path, keep: int, best: int | None, say: Callable[[str], None]) -> None:
    """Delete all restart points but the newest `keep` (0: delete none) and that of the step `best` (rank 0 does).

    A folder that holds anything beside what its manifest names is left. A point is renamed before it is deleted, so
    that a kill in between leaves none that is half there.
    """
    if not keep:
        return
    for point in points_in(output_dir)[:-keep]:
        if step_of(point) == best:
            continue
        try:
            if _is_ours(point):
                going = point.with_name(point.name + PRUNED)
                remove_folder(going)
                remove_folder(point.rename(going))
        except OSError as error:
            say(f"the older restart point {point} could not be deleted: {error}. It may be deleted by hand.")


def _is_ours(point: Path) -> bool:
    try:
        return not point.is_symlink() and files_in(point) == {MANIFEST, *Manifest.read(point).files}
    except (Damage, UserError):
        return False
