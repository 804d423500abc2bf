"""Restart points of two ranks: what one rank finds wrong, all know."""

import errno
import os
import socket
from pathlib import Path

import pytest

from engine import distributed
from engine.errors import UserError
from scripts.harness.ranks import run_ranks
from tests.training.checkpoints.tiny_points import TinyRun, flip_bit
from training.checkpoints import files, saving
from training.checkpoints.resuming import ResumePoint


def failed_and_tried_again(folder: str) -> dict:
    """Steps 1 to 4, each with a point; rank 1's disk is full at step 2, and the next try is due at once."""
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
    """What --resume makes of the points of `failed_and_tried_again`, each file of the newest damaged in turn; how many
    files each rank hashed; and what is said where rank 1 does not see the folder."""
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
    """The point's name and what was passed over, or the message."""
    try:
        point = ResumePoint.find(path, "elsewhere")
    except UserError as error:
        return ("refused", str(error))
    return (point.folder.name, *point.passed_over)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def written(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_checkpoints:failed_and_tried_again", folder=folder)


def test_a_write_that_fails_on_one_rank_leaves_the_run_going_and_the_older_points(written):
    for rank in written:
        points = [f"step_{step:06d}" for step in (1, 3, 4)]
        assert rank["there"] == {1: points[:1], 2: points[:1], 3: points[:2], 4: points}
        assert rank["newest"].endswith("step_000004")
    failed = [line for line in written[0]["said"] if "NOT WRITTEN" in line]
    assert len(failed) == 1
    assert f"of step 2: on {socket.gethostname()}: rank 1: [Errno 28] No space left on device" in failed[0]
    assert written[1]["said"] == []


def test_files_are_hashed_once_over_all_ranks_and_a_damaged_one_is_known_to_all(folder, written):
    one, two = run_ranks("tests.distributed.test_checkpoints:looked_at", folder=folder)
    names = ["config.json", "rank_00000.safetensors", "rank_00001.safetensors", "trainer_state.json"]
    assert sorted(one.pop("hashed") + two.pop("hashed")) == names
    assert one == two and one.pop("whole") == ("step_000004",)
    said, unseen = one.pop("unseen")
    there = f"step_000004: not there for rank 1 on {socket.gethostname()}. Put the restart point where every node"
    assert said == "refused" and there in unseen
    assert len(one) == 5
    for name, (used, passed_over) in one.items():
        assert used == "step_000003" and "step_000004 is damaged" in passed_over and name in passed_over
