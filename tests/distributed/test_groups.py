"""All process groups of a run have its time-out, and not torch's own."""

import json
from pathlib import Path

from scripts.harness.ranks import TIMEOUT, run_ranks


def test_every_group_waits_as_long_as_the_worlds(folder):
    plain = json.loads((Path(folder) / "stage3.json").read_text())
    zero = plain["zero_optimization"] | {"zero_hpz_partition_size": 2}
    (Path(folder) / "own_hpz.json").write_text(json.dumps(plain | {"zero_optimization": zero}))
    configs = {"stage 2": (2, "stage2.json"), "stage 3": (3, "stage3.json"), "hpZ": (3, "own_hpz.json")}
    for found in run_ranks("tests.distributed.work_groups:time_outs", folder=folder, configs=configs):
        assert [name for name, groups in found.items() if not groups] == ["stage 3"]  # which has stage 2's
        assert {seconds for groups in found.values() for seconds in groups} == {TIMEOUT}
