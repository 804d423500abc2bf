"""The health report on made-up runs: it names the illness that a run has, once, and nothing else."""

import pytest

from tests.training.reporting.made_runs import RUNS, made_run
from training.reporting.health import ALARM, FINE, LOOK, health

# How the report begins to name it, how severe it is, and the flags that it advises at least.
NAMED = {
    "collapse into one phrase": ("held-out responses became alike", ALARM, ("--kl_coef", "--actor_learning_rate")),
    "invented words": ("words are being invented", LOOK, ("--kl_coef", "--actor_learning_rate")),
    "length explosion": ("responses grew from ", LOOK, ("--length_penalty", "--kl_coef")),
    "length collapse": ("responses shrank from ", ALARM, ("--kl_coef",)),
    "KL run-away": ("KL to the reference ended at ", ALARM, ("--kl_coef", "--actor_learning_rate", "--save_steps")),
}
SEEDS = range(5)


def test_every_made_up_run_is_asked_about():
    assert set(RUNS) == {"healthy", "healthy, still on its way", *NAMED}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("run", NAMED)
def test_an_illness_is_named_and_it_alone(run, seed):
    words, severity, flags = NAMED[run]
    (finding,) = health(made_run(run, seed))
    assert finding.seen.startswith(words) and finding.severity == severity
    assert all(flag in finding.advice for flag in flags)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_run_has_none(seed):
    settled, moving = (health(made_run(run, seed)) for run in ("healthy", "healthy, still on its way"))
    assert [finding.severity for finding in (*settled, *moving)] == [FINE, FINE]
    assert settled[0].seen == moving[0].seen == "nothing stood out in 60 steps"
    assert "lower --kl_coef" in settled[0].advice and "--max_steps" not in settled[0].advice
    assert "--max_steps" in moving[0].advice and "--kl_coef" not in moving[0].advice


# What has to be told with the illness, in numbers: the signs of it that would be findings of their own.
SIGNS = {
    "collapse into one phrase": ("% of the bytes a token", "entropy fell", "responses ended by themselves", "KL to"),
    "invented words": ("of a held-out response's words stood in no other", "before it was 3"),
    "length explosion": ("of responses ended by themselves",),
    "length collapse": ("entropy fell", "KL to the reference ended at "),
    "KL run-away": ("still growing fast",),
}


@pytest.mark.parametrize("run", NAMED)
def test_an_illness_is_told_with_its_signs(run):
    (finding,) = health(made_run(run))
    assert [sign for sign in SIGNS[run] if sign not in finding.seen] == []


@pytest.mark.parametrize("run", NAMED)
def test_a_sign_of_one_illness_is_no_sign_of_another(run):
    """Two illnesses in one run are both told: skipped updates explain nothing here, and nothing explains them."""
    rows = [{**row} for row in made_run(run)]
    for row in rows[1:]:
        if row["step"] % 2:
            del row["policy/grad_norm"]
    assert len(health(rows)) == 2
