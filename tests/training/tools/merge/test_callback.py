"""What the command at a run's end chooses the scale by; tests/e2e/test_merge.py runs the command."""

import pytest

from tests.training.config.command_lines import parse
from tests.training.reporting.made_runs import made_run
from training.config.step3 import RLHFFlags
from training.tools.merge.callback import choice

JUDGE = ["--reward_function", "rules.py:length", "rules.py:judge", "--reward_weights", "1", "0"]


@pytest.mark.parametrize(
    "run, flags, expected",
    [
        ("healthy", [], ["--choose_by", "eval/score", "--kl_coef", "0.1"]),
        ("healthy", ["--set", "score_scaling=running"], []),
        ("healthy", JUDGE, ["--choose_by", "eval/reward_judge"]),
        ("KL run-away", JUDGE, ["--choose_by", "eval/reward_judge"]),
    ],
)
def test_what_chooses(run, flags, expected):
    args = parse(*flags, flags_class=RLHFFlags)
    assert choice(args, args.resolved.dialect, made_run(run)) == expected


def test_an_over_optimised_run_goes_back_to_a_smaller_kl():
    args = parse(flags_class=RLHFFlags)
    name, bound = choice(args, args.resolved.dialect, made_run("KL run-away"))
    assert name == "--max_kl" and 0.5 < float(bound) < 15.0, "of a run that ended at 68"
