"""Health in words: each finding on curves made for it, none on a run that goes well; a sampler that is not the actor;
and made-up runs, whose one illness is named once, and nothing else."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from tests.training.reporting.good_run import run, the_finding
from tests.training.reporting.made_runs import RUNS, made_run
from training.config.step3 import RLHFFlags
from training.reporting import health as health_module
from training.reporting.health import ALARM, FINE, LOOK, health
from training.tools.merge.flags import MergeFlags


def test_nothing_stands_out_in_a_good_run():
    finding = the_finding(run())
    assert (finding.severity, finding.seen) == (FINE, "nothing stood out in 40 steps")


def test_a_good_run_without_critic_and_evaluations():
    rows = run(value_loss=None, value_grad_norm=None, value_explained_variance=None)[1:]
    for name in ("eval/score", "eval/kl", "eval/response_length", "eval/distinct_bigrams"):
        del rows[-1][name]
    assert the_finding(rows).severity == FINE


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_short_run_is_not_judged_by_trends(steps):
    finding = the_finding(run(steps, objective_scores=lambda t: -t))
    assert finding.severity == FINE
    assert finding.text == f"nothing stood out in {steps} step{'s' * (steps > 1)}, too few to show a trend"


@pytest.mark.parametrize("steps", [1, 4, 7, 8, 12])
def test_a_limit_that_cuts_every_response_is_told_of_runs_of_any_length(steps):
    finding = the_finding(run(steps, rollout_eos_rate=lambda t: 0.0))
    assert finding.severity == LOOK
    assert finding.seen == "0% of responses ended by themselves at the end, the others hit the limit"
    assert "They did not from the start: raise --max_answer_seq_len" in finding.advice


def test_a_dialect_that_draws_on_after_eos_is_named():
    finding = the_finding(run(rollout_eos_rate=lambda t: 0.05, rollout_after_eos=lambda t: 0.2))
    assert finding.seen.endswith("% of responses contained EOS at the end")
    assert "--set truncate_token=eos" in finding.advice and "SFT" not in finding.advice


def test_a_score_that_did_not_rise_is_told_with_the_noise_that_it_was_measured_by():
    rows = run(10, objective_scores=None)
    for row, score in zip(rows[1:], [0.0, 0.2, 0.0, 0.2, 0.0, 0.2, 0.0, 0.2, 0.2, 0.2], strict=True):
        row["objective/scores"] = score
    # Differences of neighbours: 7 of 0.2 and 2 of 0, so a step's noise is sqrt(7 * 0.04 / 9 / 2) = 0.1247. Two standard
    # errors of the difference of two means of 2 steps are 2 * 0.1247 * sqrt(2 / 2) = 0.249.
    words = "0.1 at the start, 0.2 at the end, a change of +0.1, where up to 0.249 is within noise"
    assert words in the_finding(rows).seen


def test_runs_of_other_programs_are_not_judged():
    rows = [{"step": 0, "samples": 0, "eval/loss": 2.0}, {"step": 1, "samples": 16, "train/loss": 2.0}]
    assert the_finding(rows).text == "no step of PPO to judge"


# The words by which a finding is known, its severity, and the curves that it must see.
CASES = {
    "KL far, by response": (
        "ended at 40 nats a response, 0.2 a token",
        ALARM,
        {"objective_kl": lambda t: 40.0, "objective_kl_per_token": lambda t: 0.2},
    ),
    "KL far, by token": (
        "ended at 6 nats a response, 0.6 a token",
        ALARM,
        {"objective_kl": lambda t: 6.0, "objective_kl_per_token": lambda t: 0.6},
    ),
    "KL negative": ("a KL is not negative", ALARM, {"objective_kl": lambda t: -2 * t}),
    "entropy collapse": (
        "entropy fell from 2 to 0.5 nats a token (25% of its start)",
        LOOK,
        {"objective_entropy": lambda t: 2.0 if t < 0.5 else 0.5},
    ),
    "entropy explosion": (
        "entropy rose from 2 to 4 nats a token (2 times its start)",
        LOOK,
        {"objective_entropy": lambda t: 2.0 if t < 0.5 else 4.0},
    ),
    "value unexplained": (
        "explained variance of the value was -0.25 over the last quarter",
        LOOK,
        {"value_explained_variance": lambda t: -0.25},
    ),
    "value unexplained, but by itself": (
        "of what really followed, was -0.1 over the last quarter",
        LOOK,
        {"value_explained_outcome": lambda t: -0.1},
    ),
    "clipped": ("clip fraction was 0.4 around steps ", LOOK, {"policy_clipfrac": lambda t: 0.4}),
    "clipped for a while": (
        "clip fraction was 0.5 around steps 9-12",
        LOOK,
        {"policy_clipfrac": lambda t: 0.5 if 8 <= round(39 * t) < 12 else 0.0},
    ),
    "few end": (
        "At the start 50% did, and the score of a cut response is close to noise. Try --missing_eos_penalty 1 first",
        LOOK,
        {"rollout_eos_rate": lambda t: 0.5 if t < 0.5 else 0.05},
    ),
    "none ever ended": ("They did not from the start", LOOK, {"rollout_eos_rate": lambda t: 0.0}),
    "conversations without an end": (
        "5% of conversations ended by themselves at the end. See whether rollout/turn_limit",
        LOOK,
        {"rollout_eos_rate": lambda t: 0.05, "rollout_turns": lambda t: 3.0},
    ),
    "some errors of environments": (
        "the environment failed in 5.0% of the conversations at the end, which ended there. The run's output shows",
        LOOK,
        {"rollout_environment_errors": lambda t: 0.1 * min(t, 0.5)},
    ),
    "errors of environments": ("failed in 50.0%", ALARM, {"rollout_environment_errors": lambda t: 0.5}),
    "errors of environments alone": (
        "failed in 100.0%",
        ALARM,
        {
            "rollout_environment_errors": lambda t: 1.0,
            "rollout_turns": lambda t: 1.0,
            "rollout_eos_rate": lambda t: 0.0,
        },
    ),
    "score unmoved": ("the score did not rise beyond its noise: ", LOOK, {"objective_scores": lambda t: 0.02 * t}),
    "score unmoved, KL steady": (
        "KL to the reference is 6 nats a response: the penalty may hold the policy there",
        LOOK,
        {"objective_scores": lambda t: 0.02 * t, "objective_kl": lambda t: 6.0 * min(5 * t, 1.0)},
    ),
    "score fell": ("the score fell from ", ALARM, {"objective_scores": lambda t: -t}),
    "score fell a bit": ("the score fell from 0", ALARM, {"steps": 60, "objective_scores": lambda t: -0.083 * t}),
    "score fell back": ("and fell back to ", ALARM, {"objective_scores": lambda t: 1.1 * t - t**2}),
    "groups without a difference": (
        "in 60% of the groups at the end all responses scored the same, and comparing them taught nothing. By "
        "objective/scores see whether the prompts are solved or too hard",
        LOOK,
        {"rollout_groups_alike": lambda t: 0.2 + 0.4 * min(t / 0.8, 1.0)},
    ),
    "skipped": (
        "20 of 40 steps made no update, since gradients overflowed, the last one step 20",
        LOOK,
        {"policy_grad_norm": lambda t: None if t < 0.5 else 0.8},
    ),
    "skipped to the end": ("steps made no update", ALARM, {"policy_grad_norm": lambda t: None if t > 0.8 else 0.8}),
    "clipped scores": (
        "95% of the latest scores were beyond score_clip and counted as that, so that they do not differ. Have the",
        ALARM,
        {"objective_clipped": lambda t: 0.95},
    ),
    "some clipped scores": ("20% of the latest scores", LOOK, {"objective_clipped": lambda t: 0.2}),
}


@pytest.mark.parametrize("words, severity, curves", CASES.values(), ids=CASES)
def test_what_stands_out_is_told(words, severity, curves):
    finding = the_finding(run(**curves))
    assert words in finding.text and finding.severity == severity


def halves(first: float, last: float):
    """One value over the first half of the run, another over the second."""
    return lambda t: first if t < 0.5 else last


# In 40 steps, a curve that goes once from a to b has 39 differences, so a noise of |a - b| / sqrt(2 * 39). Two standard
# errors of a difference of two means of 4 are 0.16 * |a - b|: the mean of steps 17 to 20 is the last that is as good as
# ever. KL is 10 * (step - 1) / 39, in the mean of these steps 10 * 17.5 / 39 = 4.487.
FELL = {
    "a judge": (
        "over-optimised since step 20, if reward/judge says how good a response is: from there the score rose from ",
        "and reward/judge (weight 0) fell from 0.2 to 0.1; merging with --choose_by eval/reward_judge goes back",
        {"reward_judge": halves(0.2, 0.1), "objective_scores_judge": lambda t: 0.0},
    ),
    "ends": (
        "30% of responses ended by themselves at the end, the others hit the limit. With it: over-optimised since step "
        "20, if a",
        "the share of responses that end fell from 0.8 to 0.3; merging with --max_kl 4.5 goes back. At the "
        "start 80% did, and the score of a cut response is close to noise. Try --missing_eos_penalty 1 first",
        {"rollout_eos_rate": halves(0.8, 0.3)},
    ),
    "likelihood": (
        "over-optimised since step 20, if a reward model gives the score: ",
        "and the reference's log-prob of a token fell from -2 to -2.3; merging with --max_kl 4.5 goes back",
        {"objective_kl_per_token": halves(0.0, 0.3)},
    ),
}
OF_ALL = {"objective_kl": lambda t: 10 * t, "objective_entropy": lambda t: 2.0}


@pytest.mark.parametrize("begins, holds, curves", FELL.values(), ids=FELL)
def test_where_what_the_score_stands_for_began_to_fall(begins, holds, curves):
    finding = the_finding(run(**OF_ALL, **curves))
    assert finding.severity == LOOK and finding.text.startswith(begins) and holds in finding.text


@pytest.mark.parametrize(
    "curves",
    [
        {"reward_judge": halves(0.2, 0.1), "objective_scores_judge": halves(0.1, 0.05)},  # it has a weight
        {"reward_judge": halves(0.1, 0.2), "objective_scores_judge": lambda t: 0.0},
        {"reward_judge": lambda t: 0.1 * math.sin(99 * t), "objective_scores_judge": lambda t: 0.0},  # noise
        {"objective_kl_per_token": halves(0.0, 0.2)},
        {"objective_kl_per_token": halves(0.0, 0.3), "objective_kl": lambda t: 2 * t},  # not far enough
        {"objective_kl_per_token": halves(0.0, 0.3), "objective_reference_moves": lambda t: 9.0},
        {
            "objective_kl_per_token": halves(0.0, 0.3),
            "reward_judge": halves(0, 1),
            "objective_scores_judge": lambda t: 0,
        },
        {"rollout_eos_rate": halves(0.8, 0.45)},
    ],
)
def test_what_does_not_show_over_optimisation(curves):
    assert the_finding(run(**OF_ALL | curves)).severity == FINE


def test_a_judge_is_told_beside_a_problem():
    judge = {"reward_judge": halves(0.2, 0.1), "objective_scores_judge": lambda t: 0.0}
    far, judged = health(run(**OF_ALL | judge | {"objective_kl": halves(5.0, 40.0)}))
    assert far.seen.startswith("KL to the reference ended at 40") and judged.seen.startswith("over-optimised since")


def test_a_judge_that_falls_with_the_score_is_no_over_optimisation():
    judge = {"reward_judge": halves(0.2, 0.1), "objective_scores_judge": lambda t: 0.0}
    assert "the score fell" in the_finding(run(**OF_ALL, **judge, objective_scores=lambda t: -t)).text


def test_a_penalty_that_is_there_has_to_be_larger():
    curves = {"rollout_eos_rate": halves(0.8, 0.3), "objective_missing_eos_penalty": halves(-0.2, -0.7)}
    assert "Try a larger --missing_eos_penalty first" in the_finding(run(**OF_ALL, **curves)).text


# As far as a curve may go without being told: just inside each threshold.
@pytest.mark.parametrize(
    "curves",
    [
        {"objective_kl": lambda t: 29.0 * t**0.5, "objective_kl_per_token": lambda t: 0.49 * t**0.5},
        {"objective_kl": lambda t: -0.3, "objective_kl_per_token": lambda t: -0.01},
        {"objective_entropy": lambda t: 2.0 if t < 0.5 else 0.9},
        {"value_explained_variance": lambda t: -1.0 if t < 0.7 else 0.05},
        {"policy_clipfrac": lambda t: 0.9 if t == 0 else 0.1},
        {"rollout_eos_rate": lambda t: 0.15, "rollout_environment_errors": lambda t: 0.01},
        {"rollout_groups_alike": lambda t: 0.5},
        {"policy_grad_norm": lambda t: None if t == 0 else 0.8},
        {"objective_scores": lambda t: 2 * min(t, 0.6) - 0.3 * max(t - 0.6, 0)},
    ],
)
def test_what_is_ordinary_is_not_told(curves):
    assert the_finding(run(**curves)).severity == FINE


@pytest.mark.parametrize(
    "last, told", [(61.0, "grew from 40 to 61"), (26.0, "shrank from 40 to 26"), (59.0, None), (27.0, None)]
)
def test_length_is_judged_by_the_held_out_answers(last, told):
    rows = run(rollout_response_length=lambda t: 40 + 80 * t)  # training prompts may differ from step to step
    rows[-1] |= {"eval/response_length": last, "eval/distinct_bigrams": 50 * last}
    finding = the_finding(rows)
    assert told in finding.text if told else finding.severity == FINE


def test_length_without_evaluations():
    rows = [
        {name: value for name, value in row.items() if not name.startswith("eval/")}
        for row in run(rollout_response_length=lambda t: 40.0 if t < 0.5 else 80.0)[1:]
    ]
    assert "responses grew from 40 to 80 tokens" in the_finding(rows).text


def test_answers_that_become_alike_for_their_length():
    rows = run()
    rows[-1] |= {"eval/response_length": 30.0, "eval/distinct_bigrams": 600.0}  # 50 a token before, 20 after
    assert "became alike: 2000 distinct bigrams before, 600 after, 40% for their length" in the_finding(rows).text
    rows[-1]["eval/distinct_bigrams"] = 780.0  # 26 a token
    assert the_finding(rows).severity == FINE


def test_fewer_bigrams_that_compress_as_before_are_longer_responses():
    rows = run()
    rows[0]["eval/compressed_bytes"] = 0.8
    rows[-1] |= {"eval/distinct_bigrams": 600.0, "eval/compressed_bytes": 0.6}
    assert the_finding(rows).severity == FINE
    rows[-1]["eval/compressed_bytes"] = 0.32
    assert "compressed together they take 40% of the bytes a token" in the_finding(rows).text


@pytest.mark.parametrize("last, error, told", [(0.46, 0.02, True), (0.36, 0.02, False), (0.46, 0.08, False)])
def test_new_words_are_told_beyond_their_noise(last, error, told):
    rows = run()
    rows[0]["eval/new_words"] = 0.34
    rows[-1] |= {"eval/new_words": last, "eval/new_words_change_se": error, "eval/distinct_bigrams": 3000.0}
    words = "46% of a held-out response's words stood in no other response before training"
    assert (words in the_finding(rows).text) == told


def test_alarms_come_first():
    found = health(run(rollout_eos_rate=lambda t: 0.0, objective_scores=lambda t: -t, policy_clipfrac=lambda t: 0.5))
    assert [finding.severity for finding in found] == [ALARM, LOOK, LOOK]


def test_every_flag_that_is_advised_exists():
    advised = set(re.findall(r"--(\w+)", Path(health_module.__file__).read_text()))
    known = {field.name for flags in (RLHFFlags, MergeFlags) for field in dataclasses.fields(flags)}
    assert len(advised) > 5 and advised <= known, advised - known


@pytest.mark.parametrize("steps", [1, 20])
def test_a_sampler_that_is_not_the_actor_is_told(steps):
    near = {"rollout_logprob_gap": lambda t: 0.01, "rollout_ratio_far": lambda t: 0.0}
    assert the_finding(run(steps, **near)).severity == FINE
    apart = near | {
        "rollout_logprob_gap": lambda t: 0.06,
    }
    finding = the_finding(run(steps, **apart))
    assert finding.severity == LOOK
    assert finding.seen == (
        "the sampler's log-probs ended 0.06 nats a token from the actor's, and 0.0% of the tokens had a ratio outside "
        "0.5 to 2"
    )
    another = the_finding(run(steps, **apart | {"rollout_ratio_far": lambda t: 0.2}))
    assert another.severity == ALARM and "20.0% of the tokens" in another.seen
    assert "has the actor's weights" in finding.advice
    pads = the_finding(run(steps, **apart | {"rollout_hidden_tokens": lambda t: 0.03}))
    assert "3.0% of the tokens" in pads.advice and "--set pad_token=tokenizer" in pads.advice
    assert "weights" not in pads.advice
    # A KL that is negative is one of its signs.
    both = the_finding(run(steps, **apart | {"objective_kl": lambda t: -2.0}))
    assert both.severity == ALARM and "With it: KL to the reference ended at -2 nats" in both.seen


# How the report begins to name it, how severe it is, and the flags that it advises at least.
NAMED = {
    "collapse into one phrase": ("held-out responses became alike", ALARM, ("--kl_coef", "--actor_learning_rate")),
    "invented words": ("words are being invented", LOOK, ("--kl_coef", "--actor_learning_rate")),
    "length explosion": (
        "of responses ended by themselves at the end",
        LOOK,
        ("--missing_eos_penalty", "--length_penalty"),
    ),
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
    assert re.match(rf"\d*%? ?{words}", finding.seen) and finding.severity == severity
    assert all(flag in finding.advice for flag in flags)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_run_has_none(seed):
    settled, moving = (health(made_run(run, seed)) for run in ("healthy", "healthy, still on its way"))
    assert [finding.severity for finding in (*settled, *moving)] == [FINE, FINE]
    assert settled[0].seen == moving[0].seen == "nothing stood out in 60 steps"


# What has to be told with the illness, in numbers: the signs of it that would be findings of their own.
SIGNS = {
    "collapse into one phrase": ("% of the bytes a token", "entropy fell", "responses ended by themselves", "KL to"),
    "invented words": ("of a held-out response's words stood in no other", "before it was 3"),
    "length explosion": ("responses grew from ", "over-optimised since step "),
    "length collapse": ("entropy fell", "KL to the reference ended at "),
}


@pytest.mark.parametrize("run", SIGNS)
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
