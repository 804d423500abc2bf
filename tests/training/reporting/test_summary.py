"""The summary of a run: what is read, and the text to the letter."""

import math

import pytest

from engine.errors import UserError
from tests.training.reporting.metric_rows import ROWS, write
from training.reporting.health import Finding
from training.reporting.records import read_metrics
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
    summary = RunSummary.from_metrics(read_metrics(write(tmp_path / "m.jsonl", *ROWS)), curves="c.png")
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
    elsewhere = "/somewhere/else/curves.png"
    rows = [{name: math.nan if value is None else value for name, value in row.items()} for row in ROWS]
    since = {"time/wall": 4.0, "time/save": 3.0}
    summary = RunSummary.from_metrics(rows, since=since, saved={"actor": tmp_path / "run" / "actor"}, curves=elsewhere)
    assert (
        summary_text(summary)
        == """\
held-out prompts              before       after      change  EMA, after
  score                       -0.500       1.250      +1.750       1.000
  KL to the reference          0.000       2.000      +2.000       1.500
  response length             20.000      24.500      +4.500
  distinct bigrams             0.750       0.500      -0.250

health
  alarm  not finite: objective/scores, at step 2. Lower the learning rates; in fp16, use bf16 or
         fp32 if you can.

128 responses in 2 steps, 0:00:40
  start-up                     5.0 s       12.5%
  generate                     6.0 s       15.0%
  train                       10.0 s       25.0%
  evaluations                  5.5 s       13.8%
  restart points               2.0 s        5.0%
  saving models                3.0 s        7.5%
  other                        8.5 s       21.2%

saved
  actor   run/actor
  curves  /somewhere/else/curves.png"""
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
