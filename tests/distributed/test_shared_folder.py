"""Ranks that do not see one output folder are told of before the first step."""

from tests.distributed.harness import run_ranks


def test_a_rank_that_does_not_see_the_folder_is_named_on_all(tmp_path):
    ranks = run_ranks("tests.distributed.work_shared_folder:looked", folder=str(tmp_path))
    for shared, apart, left in ranks:
        assert shared is None and left == []
        assert apart.startswith(f"--output_dir {tmp_path}/new/out: rank 1 on ")
        assert f"writes in {tmp_path}. Models and restart points need a folder that all nodes share: give" in apart
