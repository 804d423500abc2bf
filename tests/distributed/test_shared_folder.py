"""Ranks that do not share one output folder are told of before anything is loaded."""

import socket

from tests.distributed.harness import run_ranks


def test_a_rank_that_does_not_share_the_folder_is_named_on_all(tmp_path):
    host = socket.gethostname()

    def message(written, looks_in, problem):
        return (
            f"--output_dir {{given}} is not one folder for all ranks. Rank 0 on {host} writes in {written}; {host} "
            f"(rank 1), which looks in {looks_in}, {problem}. Models and checkpoints need a folder that all nodes "
            "share: give one on a network file system, mounted at the same path on all of them and writable on each."
        )

    one, two = tmp_path / "0", tmp_path / "1"
    for rank, found in enumerate(run_ranks("tests.distributed.work_shared_folder:looked", folder=str(tmp_path))):
        own = tmp_path / str(rank)
        assert found["shared"] == found["late"] == (None, ["run.lock"])
        raised, left = found["apart"]
        assert raised == message(one / "new", two / "new", "does not see that").format(given=own / "new")
        assert left == (["run.lock"] if rank == 0 else [])
        raised, left = found["with another's lock"]
        assert raised == message(one, two, "does not see that").format(given=own)
        assert "run.lock" in left
        raised, left = found["read-only"]
        shared = tmp_path / "shared"
        assert raised == message(shared, shared, "cannot write there (Read-only file system)").format(given=shared)
        assert left == ["run.lock"]
