"""The picture of a run's curves: what is drawn, over what."""

import numpy as np
import pytest

from engine.errors import UserError
from tests.training.reporting.metric_rows import ROWS, write
from training.reporting import plot
from training.reporting.plot import plot_curves, smooth


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
    plot_curves(write(tmp_path / "metrics.jsonl", *rows), png)
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
    path = write(tmp_path / "metrics.jsonl", {"step": 0, "samples": 0, "policy/loss": None})
    with pytest.raises(UserError, match="metrics.jsonl: holds no metrics to draw"):
        plot_curves(path, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
