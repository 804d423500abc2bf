"""Runs killed inside a save and an update go on as if nothing had happened, to the last bit.

scripts/trial_kills.py kills in all phases, and often, and the launcher too.
"""

from scripts.harness.kills import KillTrial, random_instants

STEPS = 3


def test_killed_runs_go_on_bit_by_bit(tiny, tmp_path):
    trial = KillTrial(tiny, tmp_path / "runs", STEPS, forked=True)
    instants = random_instants(3, STEPS, seed=1)[1:]
    outcomes = [trial.kill(instant, f"run_{number}") for number, instant in enumerate(instants)]
    assert [outcome.different for outcome in outcomes] == [[]] * 2, outcomes
