"""Run by ranks: checkpoints of a tiny state, a write that fails on rank 1, and looks at checkpoints that are
damaged."""

import errno
import os
from pathlib import Path

from engine import distributed
from engine.errors import UserError
from tests.training.checkpoints.tiny_points import TinyRun, flip_bit
from training.checkpoints import files, saving
from training.checkpoints.resuming import ResumePoint


def failed_and_tried_again(folder: str) -> dict:
    """Steps 1 to 4, each with a checkpoint; rank 1's disk is full at step 2, and the next try is due at once."""
    os.environ["LOCAL_SIZE"] = "1"  # each rank on a host of its own
    write, run = saving.write_shards, TinyRun(Path(folder), steps=1)
    saving.RETRY_AFTER = 0.0

    def write_or_fail(path, shards):
        if run.step == 2 and distributed.rank() == 1:
            write(path, shards)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, shards)

    saving.write_shards = write_or_fail
    there = {}
    for step in range(1, 5):
        run.train_to(step)
        distributed.barrier()
        there[step] = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
        distributed.barrier()
    saving.write_shards = write
    return {"there": there, "said": run.said, "newest": str(run.checkpoints.newest)}


def looked_at(folder: str) -> dict:
    """What --resume makes of the checkpoints of `failed_and_tried_again`, each file of the newest damaged in turn; how
    many files each rank hashed; and what is said where rank 1 does not see the folder."""
    newest = Path(folder) / "checkpoints" / "step_000004"
    hashed, problem = [], files._problem

    def counted(path, record):
        hashed.append(path.name)
        return problem(path, record)

    files._problem = counted
    found = {"whole": find(folder), "hashed": sorted(hashed)}
    for name in sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()):
        for damaging in (True, False):
            if distributed.is_main():
                flip_bit(newest / name)
            distributed.barrier()
            if damaging:
                found[name] = find(folder)
            distributed.barrier()
    if distributed.rank() == 1:
        folder = f"{folder}_of_another_node"
        files.Path.is_dir = lambda path: False
    found["unseen"] = find(str(newest))
    return found


def find(path: str) -> tuple[str, ...]:
    """The checkpoint's name and what was passed over, or the message."""
    try:
        point = ResumePoint.find(path, "elsewhere")
    except UserError as error:
        return ("refused", str(error))
    return (point.folder.name, *point.passed_over)
