"""The report: what is read, what is drawn, and the summary to the letter."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from engine.errors import UserError
from training.reporting import plot
from training.reporting.health import Finding
from training.reporting.metrics_file import read_metrics
from training.reporting.plot import plot_curves, smooth
from training.reporting.summary import RunSummary, summary_text


def _write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


ROWS = (
    {
        "step": 0,
        "samples": 0,
        "eval/score": -0.5,
        "eval/kl": 0.0,
        "eval/response_length": 20.0,
        "eval/distinct_bigrams": 0.75,
    },
    {
        "step": 1,
        "samples": 64,
        "objective/scores": 0.25,
        "objective/kl": 0.5,
        "policy/loss": -0.125,
        "policy/grad_norm": 1.0,
        "time/generate": 3.0,
        "time/train": 5.0,
        "time/step": 10.0,
    },
    {
        "step": 2,
        "samples": 128,
        "objective/scores": None,
        "objective/kl": 1.0,
        "policy/loss": 0.25,
        "policy/grad_norm": 1.0,
        "time/generate": 3.0,
        "time/train": 5.0,
        "time/checkpoint": 2.0,
        "time/step": 10.0,
        "eval/score": 1.25,
        "eval/kl": 2.0,
        "eval/response_length": 24.5,
        "eval/distinct_bigrams": 0.5,
        "eval/ema_score": 1.0,
        "eval/ema_kl": 1.5,
    },
)


def test_read_metrics_gives_nan_for_null_and_leaves_out_a_half_written_line(tmp_path):
    path = _write(tmp_path / "metrics.jsonl", *ROWS)
    with path.open("a") as file:
        file.write('{"step": 3')
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1] == ROWS[1]
    assert math.isnan(rows[2]["objective/scores"])
    with pytest.raises(UserError, match="absent.jsonl: no such file"):
        read_metrics(tmp_path / "absent.jsonl")


def test_summary_from_metrics(tmp_path):
    summary = RunSummary.from_metrics(read_metrics(_write(tmp_path / "m.jsonl", *ROWS)), curves="c.png")
    assert summary.before == {name: value for name, value in ROWS[0].items() if name.startswith("eval/")}
    assert summary.after["eval/score"] == 1.25 and summary.after["eval/ema_kl"] == 1.5
    assert "objective/kl" not in summary.after
    assert (summary.steps, summary.responses) == (2, 128)
    assert summary.phase_seconds == {"checkpoint": 2.0, "generate": 6.0, "train": 10.0, "other": 2.0}


def test_rounding_is_no_other_phase():
    rows = [{"step": 1, "samples": 8, "time/a": 0.1, "time/b": 0.2, "time/step": 0.1 + 0.2 + 1e-9}]
    assert RunSummary.from_metrics(rows).phase_seconds == {"a": 0.1, "b": 0.2}


def test_a_run_evaluated_only_at_its_end_has_no_before(tmp_path):
    summary = RunSummary.from_metrics(read_metrics(_write(tmp_path / "m.jsonl", *ROWS[1:])))
    assert summary.before == {} and summary.after["eval/score"] == 1.25
    summary = RunSummary.from_metrics(ROWS[:1])
    assert summary.before["eval/score"] == -0.5 and summary.after == {}


def test_summary_text_exactly(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    elsewhere = "/somewhere/else/curves.png"
    rows = [{name: math.nan if value is None else value for name, value in row.items()} for row in ROWS]
    summary = RunSummary.from_metrics(rows, saved={"actor": tmp_path / "run" / "actor"}, curves=elsewhere)
    assert (
        summary_text(summary)
        == """\
held-out prompts              before       after      change    EMA, after
  score                       -0.500       1.250      +1.750         1.000
  KL to the reference          0.000       2.000      +2.000         1.500
  response length             20.000      24.500      +4.500
  distinct bigrams             0.750       0.500      -0.250

health
  alarm  not finite: objective/scores, at step 2. Lower the learning rates; in fp16, use bf16 or
         fp32 if you can.

128 responses in 2 steps, 0:00:20
  checkpoint                   2.0 s       10.0%
  generate                     6.0 s       30.0%
  train                       10.0 s       50.0%
  other                        2.0 s       10.0%

saved
  actor   run/actor
  curves  /somewhere/else/curves.png"""
    )


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


def test_smooth_averages_what_exists():
    values = np.arange(40.0)
    values[20] = 45.0  # windows are 2 to either side: 5 values, fewer at the ends
    smoothed = smooth(values)
    assert len(smoothed) == 40
    assert smoothed[0] == 1.0  # 0 1 2
    assert smoothed[1] == 1.5  # 0 1 2 3
    assert smoothed[10] == 10.0
    assert smoothed[18] == 18.0 + 25 / 5
    assert smoothed[39] == 38.0


def _panels(monkeypatch, rows, tmp_path):
    """The titles, curves (label, x, y) and scatter points that `plot_curves` draws, and its PNG."""
    from matplotlib.axes import Axes

    titles, curves, scatters = [], {}, []
    set_title, plot, scatter = Axes.set_title, Axes.plot, Axes.scatter

    def spy_title(axes, title, **options):
        titles.append(title)
        return set_title(axes, title, **options)

    def spy_plot(axes, x, y, *style, **options):
        if "label" in options:
            curves[titles[-1], options["label"]] = (list(x), list(y))
        return plot(axes, x, y, *style, **options)

    def spy_scatter(axes, x, y, c, **options):
        scatters.append((list(x), list(y), list(c)))
        return scatter(axes, x, y, c=c, **options)

    monkeypatch.setattr(Axes, "set_title", spy_title)
    monkeypatch.setattr(Axes, "plot", spy_plot)
    monkeypatch.setattr(Axes, "scatter", spy_scatter)
    png = tmp_path / "curves.png"
    plot_curves(_write(tmp_path / "metrics.jsonl", *rows), png)
    assert png.read_bytes().startswith(b"\x89PNG")
    return titles, curves, scatters


def test_plot_draws_what_there_is_over_samples(monkeypatch, tmp_path):
    titles, curves, scatters = _panels(monkeypatch, ROWS, tmp_path)
    assert titles == ["score", "KL to the reference", "score against KL", "policy"]
    assert curves == {
        ("score", "training prompts"): ([64], [0.25]),
        ("score", "held out"): ([0, 128], [-0.5, 1.25]),
        ("score", "held out, EMA"): ([128], [1.0]),
        ("KL to the reference", "training prompts"): ([64, 128], [0.5, 1.0]),
        ("KL to the reference", "held out"): ([0, 128], [0.0, 2.0]),
        ("KL to the reference", "held out, EMA"): ([128], [1.5]),
        ("policy", "loss"): ([64, 128], [-0.125, 0.25]),
    }
    assert scatters == [([0.5], [0.25], [1])]  # the step with a NaN score has no dot


def test_no_scatter_without_a_step_that_has_both(monkeypatch, tmp_path):
    rows = [{"step": 1, "samples": 8, "objective/scores": 1.0}, {"step": 2, "samples": 16, "objective/kl": 1.0}]
    titles, _, scatters = _panels(monkeypatch, rows, tmp_path)
    assert titles == ["score", "KL to the reference"] and scatters == []


def test_plot_of_a_whole_run_has_six_panels(monkeypatch, tmp_path):
    metrics = {curve.metric for _, curves in plot.PANELS for curve in curves}
    rows = [{"step": step, "samples": 8 * step, **{name: float(step % 5) for name in metrics}} for step in range(40)]
    titles, curves, _ = _panels(monkeypatch, rows, tmp_path)
    assert titles == ["score", "KL to the reference", "score against KL", "response", "policy", "value"]
    assert len(curves) == len(metrics)
    assert curves["value", "loss"][1][10] == 2.0  # smoothed: 3 4 0 1 2
    assert curves["score", "held out"][1][11] == 1.0  # measured now and then: as it is


def test_plot_of_nothing_is_the_users_mistake(tmp_path):
    path = _write(tmp_path / "metrics.jsonl", {"step": 0, "samples": 0, "policy/loss": None})
    with pytest.raises(UserError, match="metrics.jsonl: holds no metrics to draw"):
        plot_curves(path, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
