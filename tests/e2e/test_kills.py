"""Runs killed inside the last evaluation, a save and an update go on as if nothing had happened, to the last bit."""

from tests.e2e.kills import KillTrial, random_instants

STEPS = 3


def test_killed_runs_go_on_bit_by_bit(tiny, tmp_path):
    trial = KillTrial(tiny, tmp_path / "runs", STEPS)
    outcomes = [
        trial.kill(instant, f"run_{number}") for number, instant in enumerate(random_instants(3, STEPS, seed=1))
    ]
    assert [outcome.different for outcome in outcomes] == [()] * 3, outcomes
