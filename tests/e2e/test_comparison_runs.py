"""What a comparison that was cut off left, and one that goes on makes of it."""

from scripts.comparison.entries import Entry
from scripts.comparison.runs import POLICIES, Run, keep_policies
from scripts.comparison.tasks import TASKS


def test_what_a_cut_off_comparison_left_of_a_policy_is_none(tmp_path):
    run = Run(TASKS["quickstart"], Entry.parsed("default"), tmp_path / "models", tmp_path, 1e-3, 1)
    for name in ("step_000001", "step_000002.4321.partial"):
        (run.folder / POLICIES / name).mkdir(parents=True)
    keep_policies(run)
    assert [path.name for path in (run.folder / POLICIES).iterdir()] == ["step_000001"]
