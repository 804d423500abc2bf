"""Checkpoints of two ranks: what one rank finds wrong, all know."""

import socket

import pytest

from tests.distributed.harness import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def written(folder) -> list[dict]:
    return run_ranks("tests.distributed.work_checkpoints:failed_and_tried_again", folder=folder)


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
    one, two = run_ranks("tests.distributed.work_checkpoints:looked_at", folder=folder)
    names = ["config.json", "rank_00000.safetensors", "rank_00001.safetensors", "trainer_state.json"]
    assert sorted(one.pop("hashed") + two.pop("hashed")) == names
    assert one == two and one.pop("whole") == ("step_000004",)
    said, unseen = one.pop("unseen")
    there = f"step_000004: not there for rank 1 on {socket.gethostname()}. Put the checkpoint where every node"
    assert said == "refused" and there in unseen
    assert len(one) == 5
    for name, (used, passed_over) in one.items():
        assert used == "step_000003" and "step_000004 is damaged" in passed_over and name in passed_over
