"""The summary of a run: what is read, and the text to the letter; what its held-out metrics are judged to be; no score
of before a change of the reward beside one of now.
"""

import json
import math

import pytest

from engine.errors import RunStopped, UserError
from tests.training.reporting.metric_rows import ROWS, write
from training.reporting.evaluation import PromptEvaluations
from training.reporting.guards import Kind, Verdict, conclude, of_ppo, of_reward, of_sft
from training.reporting.health import Finding, health
from training.reporting.run_record import read_metrics
from training.reporting.standard_errors import Estimate, paired, with_errors, without_scores
from training.reporting.summary import RunSummary, summary_text


def test_read_metrics_gives_nan_for_null_and_leaves_out_a_half_written_line(tmp_path):
    path = write(tmp_path / "metrics.jsonl", *ROWS)
    with path.open("a") as file:
        file.write('{"step": 3')
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1] == ROWS[1]
    assert math.isnan(rows[2]["objective/scores"])
    with pytest.raises(UserError, match="absent.jsonl: no such file"):
        read_metrics(tmp_path / "absent.jsonl")


def test_summary_from_metrics(tmp_path):
    summary = RunSummary.from_metrics(read_metrics(write(tmp_path / "m.jsonl", *ROWS)))
    assert summary.before == {name: value for name, value in ROWS[0].items() if name.startswith("eval/")}
    assert summary.after["eval/score"] == 1.25 and summary.after["eval/ema_kl"] == 1.5
    assert "objective/kl" not in summary.after
    assert (summary.steps, summary.responses) == (2, 128)
    times = {"start": 5.0, "generate": 6.0, "train": 10.0, "evaluate": 5.5, "checkpoint": 2.0, "other": 7.5}
    assert summary.phase_seconds == times  # 8 + 10.5 + 17.5 = 36 together
    since = {"time/wall": 4.0, "time/save": 3.0}
    summary = RunSummary.from_metrics(read_metrics(tmp_path / "m.jsonl"), since=since)
    assert summary.phase_seconds == times | {"save": 3.0, "other": 8.5}


def test_a_run_evaluated_only_at_its_end_has_no_before(tmp_path):
    summary = RunSummary.from_metrics(read_metrics(write(tmp_path / "m.jsonl", *ROWS[1:])))
    assert summary.before == {} and summary.after["eval/score"] == 1.25
    summary = RunSummary.from_metrics(ROWS[:1])
    assert summary.before["eval/score"] == -0.5 and summary.after == {}


def test_summary_text_exactly(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = [{name: math.nan if value is None else value for name, value in row.items()} for row in ROWS]
    since = {"time/wall": 4.0, "time/save": 3.0}
    saved = {"actor": tmp_path / "run" / "actor", "critic": "/somewhere/else/critic"}
    summary = RunSummary.from_metrics(rows, since=since, saved=saved)
    assert (
        summary_text(summary)
        == """\
held-out prompts              before       after      change  EMA, after
  score                       -0.500       1.250      +1.750       1.000
  KL to the reference          0.000       2.000      +2.000       1.500
  response length             20.000      24.500      +4.500
  distinct bigrams             0.750       0.500      -0.250

health
  fine   nothing stood out in 2 steps, too few to show a trend

128 responses in 2 steps, 0:00:40
  start-up                     5.0 s       12.5%
  generate                     6.0 s       15.0%
  train                       10.0 s       25.0%
  evaluations                  5.5 s       13.8%
  checkpoints                  2.0 s        5.0%
  saving models                3.0 s        7.5%
  other                        8.5 s       21.2%

saved
  actor   run/actor
  critic  /somewhere/else/critic"""
    )


ERRORS = {
    0: {"eval/score_se": 0.25, "eval/kl_se": 0.0, "eval/response_length_se": 1.25},
    2: {
        "eval/score_se": 0.5,
        "eval/score_change": 1.75,
        "eval/score_change_se": 0.125,
        "eval/kl_se": 0.25,
        "eval/kl_change": 2.0,
        "eval/kl_change_se": 0.25,
        "eval/response_length_se": 2.0,
        "eval/response_length_change": 4.5,
        "eval/response_length_change_se": 2.25,
        "eval/ema_score_se": 0.5,
    },
}


def test_errors_stand_beside_their_means_and_noise_is_called_so():
    rows = [{**row, **ERRORS.get(row["step"], {}), "objective/scores": 0.0} for row in ROWS]
    table = """\
held-out prompts                    before             after            change        EMA, after
  score                     -0.500 ± 0.250     1.250 ± 0.500    +1.750 ± 0.125     1.000 ± 0.500
  KL to the reference        0.000 ± 0.000     2.000 ± 0.250    +2.000 ± 0.250             1.500
  response length           20.000 ± 1.250    24.500 ± 2.000    +4.500 ± 2.250
  distinct bigrams                   0.750             0.500            -0.250
  ± is one standard error; a change's is paired, of the differences prompt by prompt
  within noise (2 standard errors): the change of response length
"""
    text = summary_text(RunSummary.from_metrics(rows))
    assert text.startswith(table)
    # A run that went on in another folder: what was before stands in the first one's metrics.
    text = summary_text(RunSummary.from_metrics(rows[1:]))
    assert (
        "\n  score                                        1.250 ± 0.500    +1.750 ± 0.125     1.000 ± 0.500\n" in text
    )


def test_each_part_of_the_score_has_a_line():
    before, after = ({"eval/score": 0.25, "eval/reward_right": share, "eval/reward_right_se": 0.0} for share in (0, 1))
    rows = [{"step": 0, "samples": 0, **before}, {"step": 1, "samples": 4, "eval/ema_reward_right": 0.5, **after}]
    lines = [line.split() for line in summary_text(RunSummary.from_metrics(rows)).splitlines()]
    assert lines[2] == ["reward", "right", "0.000", "±", "0.000", "1.000", "±", "0.000", "+1.000", "0.500"]
    assert lines[3][0] != "reward", "its standard error is no part of the score"
    # Scored by another reward since: the KL has a change, and the score none.
    rows[1]["eval/kl_change"] = 0.0
    lines = [line.split() for line in summary_text(RunSummary.from_metrics(rows)).splitlines()]
    assert lines[2] == ["reward", "right", "1.000", "±", "0.000", "0.500"]


def test_summary_of_a_run_that_measured_nothing():
    text = summary_text(RunSummary(before={}, after={}, steps=0, responses=0, phase_seconds={}))
    assert text == "held-out prompts: not evaluated\n\n0 responses in 0 steps, 0:00:00"


def test_the_summary_stays_within_100_columns_and_keeps_flags_whole():
    text = "KL was 40 and --actor_learning_rate-with-hyphens " * 12
    summary = RunSummary(
        before={},
        after={},
        steps=123456,
        responses=12345678,
        findings=[Finding("look", text)] * 2,
        phase_seconds={"make_experience": 1234567.5, "generate": 1.0},
    )
    lines = summary_text(summary).splitlines()
    assert max(map(len, lines)) <= 100 and lines[2] == "health" and lines[3].startswith("  look   KL was 40")
    assert sum(line.count("--actor_learning_rate-with-hyphens") for line in lines) == 24


VOCABULARY = 1000  # a uniform guess has ln 1000 = 6.908 nats


def rows(**metrics) -> list[dict]:
    """Two evaluations, before the first step and after the last; a metric's value in each by its name behind eval/."""
    return [
        {"step": step, "samples": step, **{f"eval/{name}": values[place] for name, values in metrics.items()}}
        for place, step in enumerate((0, 10))
    ]


@pytest.mark.parametrize(
    "before, after, kind",
    [
        (3.0, 2.0, Kind.FINE),
        (3.0, 3.019, Kind.FINE),
        (3.0, 3.021, Kind.WORSE),
        (3.0, 6.9, Kind.WORSE),
        (3.0, 6.91, Kind.BROKEN),
        (7.3, 7.31, Kind.FINE),  # an untrained model that stays one
        (7.3, 9.0, Kind.BROKEN),
        (3.0, math.nan, Kind.BROKEN),  # as infinity is read, too
    ],
)
def test_step_1(before, after, kind):
    verdict = of_sft(rows(loss=(before, after)), VOCABULARY)
    assert verdict.kind == kind
    assert bool(verdict.seen) == (kind != Kind.FINE)
    if verdict.seen:
        assert f"was {before:.4g}" in verdict.seen[0] and "--learning_rate" in verdict.seen[0]


@pytest.mark.parametrize(
    "accuracy, loss, std, kind",
    [
        ((0.5, 0.7), (0.70, 0.55), (0.1, 0.5), Kind.FINE),
        ((0.5, 0.7), (0.70, 0.75), (0.1, 0.5), Kind.FINE),  # noise: 2 sqrt(0.01 + 0.25) / 10 = 0.102
        ((0.5, 0.7), (0.70, 0.81), (0.1, 0.5), Kind.WORSE),  # orders better, and is too sure
        ((0.5, 0.5), (0.70, 0.58), (0.1, 0.5), Kind.FINE),
        ((0.5, 0.5), (0.70, 0.60), (0.1, 0.5), Kind.WORSE),
        ((0.5, 0.0), (0.70, math.log(2)), (0.1, 0.0), Kind.WORSE),  # all scores equal
        ((0.5, 0.48), (0.70, 4.0), (0.1, 5.0), Kind.BROKEN),
        ((0.9, 0.5), (0.30, 0.69), (0.1, 0.1), Kind.WORSE),  # no better than a coin, nor worse than one
        ((0.5, 0.48), (0.70, math.nan), (0.1, math.nan), Kind.BROKEN),
    ],
)
def test_step_2(accuracy, loss, std, kind):
    errors = {"pair_loss_se": (std[0] / 10, std[1] / 10), "pair_loss_change_se": (0.0, math.hypot(*std) / 10)}
    assert of_reward(rows(accuracy=accuracy, pair_loss=loss, **errors)).kind == kind  # of 100 pairs


GOOD = {
    "score": (0.0, 1.0),
    "score_change_se": (0.0, 2**0.5 / 10),
    "kl": (0.0, 20.0),
    "response_length": (20.0, 18.0),
    "distinct_responses": (100.0, 60.0),
}


@pytest.mark.parametrize(
    "changes, kind, word",
    [
        ({}, Kind.FINE, ""),
        ({"score": (0.0, -0.28)}, Kind.FINE, ""),  # noise: 2 sqrt(2) / 10 = 0.283
        ({"score": (0.0, -0.29)}, Kind.WORSE, "score was 0"),
        ({"kl": (0.0, 36.1)}, Kind.WORSE, "beyond reason"),  # 2.006 a token
        ({"kl": (0.0, 35.9)}, Kind.FINE, ""),
        ({"kl": (0.0, 29.0), "response_length": (5.0, 5.0)}, Kind.FINE, ""),
        ({"distinct_responses": (100.0, 1.0)}, Kind.WORSE, "all the same"),
        ({"distinct_responses": (3.0, 1.0)}, Kind.FINE, ""),
        ({"distinct_responses": (100.0, 1.0), "score": (0.0, -3.0)}, Kind.BROKEN, "all the same"),
        ({"response_length": (20.0, 1.0), "kl": (0.0, 3.0)}, Kind.BROKEN, "empty"),
        ({"response_length": (1.0, 1.0), "kl": (0.0, 1.0)}, Kind.FINE, ""),  # answers of one word
    ],
)
def test_step_3(changes, kind, word):
    verdict = of_ppo(rows(**GOOD | changes), prompts=100)
    assert verdict.kind == kind
    assert word in " ".join(verdict.seen)


@pytest.mark.parametrize(
    "score, error, kind",
    [
        (-0.21, 0.1, Kind.WORSE),
        (-0.19, 0.1, Kind.FINE),
        (-0.35, 0.2, Kind.FINE),
    ],
)
def test_noise_is_two_standard_errors_of_the_change(score, error, kind):
    assert of_ppo(rows(**GOOD | {"score": (0.0, score), "score_change_se": (0.0, error)}), prompts=100).kind == kind
    pairs = {"accuracy": (0.5, 0.7), "pair_loss": (0.7, 0.7 - score)}
    assert of_reward(rows(**pairs, pair_loss_change_se=(0.0, error))).kind == kind
    texts = rows(loss=(3.0, 3.0 - score), loss_change_se=(math.nan, error))
    assert of_sft(texts, VOCABULARY).kind == kind


def curve(scores: list[float], kl: float) -> list[dict]:
    metrics = {"objective/kl": kl, "rollout/response_length": 10.0}
    return [{"step": i, "samples": i, "objective/scores": score, **metrics} for i, score in enumerate(scores, 1)]


@pytest.mark.parametrize(
    "scores, kl, kind",
    [
        ([0.0, 0.01] * 5 + [1.0, 1.01] * 5, 5.0, Kind.FINE),
        ([1.0, 1.01] * 5 + [0.0, 0.01] * 5, 5.0, Kind.WORSE),
        ([0.0, 0.01] * 5 + [1.0, 1.01] * 5, 31.0, Kind.WORSE),
    ],
)
def test_without_held_out_prompts_the_training_curves_are_judged(scores, kl, kind):
    assert of_ppo(curve(scores, kl), prompts=0).kind == kind


def test_last_words(capsys):
    conclude(Verdict(), "out")
    assert capsys.readouterr().out == "done: saved in out\n"
    conclude(Verdict(Kind.WORSE, ("It fell.",)), "out")
    said = capsys.readouterr().out
    assert said.startswith("WARNING: ") and "saved in out.\n  It fell.\n" in said and "done" not in said
    with pytest.raises(RunStopped, match=r"broken the model[^\n]*saved in out\.\n  It fell\."):
        conclude(Verdict(Kind.BROKEN, ("It fell.",)), "out")


BEFORE = {"score": [1.0, 3.0], "length": [1.0, 2.0], "bonus": [0.0, 1.0], "kl": [0.0, 2.0], "new_words": [0.0, 0.0]}


def test_parts_of_other_names_are_another_rewards():
    assert paired(BEFORE, ["bonus", "length"]) == BEFORE
    assert paired(BEFORE, ["length", "malus"]) == paired(BEFORE, []) == {"kl": [0.0, 2.0], "new_words": [0.0, 0.0]}
    assert paired(paired(BEFORE, []), ["malus", "length"]) == without_scores(BEFORE)  # as a later checkpoint has it
    assert paired(None, ["length"]) is None and without_scores(None) is None


def test_what_was_not_measured_before_has_no_change():
    now = {name: Estimate.of(values) for name, values in {"score": [5.0, 7.0], "kl": [1.0, 3.0]}.items()}
    metrics = with_errors(now, {"kl": Estimate.of([0.0, 2.0])})
    assert metrics == {"score": 6.0, "score_se": 1.0, "kl": 2.0, "kl_se": 1.0, "kl_change": 1.0, "kl_change_se": 0.0}


def changed_run() -> list[dict]:
    """The reward was changed behind step 10: a score of 60 before it, of 0.6 and 0.5 after."""
    found = rows(**GOOD | {"score": (70.0, 60.0)}, score_change=(0.0, -10.0), kl_change=(0.0, 20.0))
    for step, score in ((20, 0.6), (30, 0.5)):
        later = {name: value for name, value in found[1].items() if name != "eval/score_change"}
        found.append(later | {"step": step, "samples": step, "eval/score": score})
    return found


def test_no_verdict_and_no_change_is_of_two_rewards(tmp_path):
    found = changed_run()
    assert of_ppo(found[:2], prompts=100).kind == Kind.WORSE  # 10 less, by one reward
    assert of_ppo(found, prompts=100).kind == Kind.FINE
    summary = RunSummary.from_metrics(found)
    assert "eval/score" not in summary.before and summary.before["eval/kl"] == 0.0
    lines = summary_text(summary).splitlines()
    assert next(line for line in lines if line.startswith("  score ")).split() == ["score", "0.500"]
    assert "  the score is another reward's than before the run went on: it has no before and no change" in lines
    assert "KL to the reference          0.000      20.000     +20.000" in summary_text(summary)
    assert "another reward" not in summary_text(RunSummary.from_metrics(found[:2]))


@pytest.mark.parametrize("drop", [0.0, 70.0])
def test_a_curve_of_scores_does_not_fall_where_the_reward_changed(drop):
    scores = [70.0 - drop * (step > 10) + step / 10 for step in range(1, 31)]
    steady = {"objective/kl": 1.0, "rollout/response_length": 10.0}
    found = [{"step": i, "samples": i, "objective/scores": score, **steady} for i, score in enumerate(scores, 1)]
    told = of_ppo(found, prompts=0).seen + tuple(finding.text for finding in health(found))
    assert any("the score fell from 70" in text for text in told) == (drop > 0)
    found[10]["objective/reward_changed"] = 1.0
    assert of_ppo(found, prompts=0).kind == Kind.FINE
    assert not any("score fell" in finding.text for finding in health(found))


def test_scores_of_before_count_for_no_best_point_and_no_rise(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed_run()))
    evaluations = PromptEvaluations(None, None, tmp_path, last_step=30, every=10)
    assert evaluations.scores(read_metrics(tmp_path / "metrics.jsonl")) == {20: 0.6, 30: 0.5}
