"""The picture of a run's curves: what is drawn, over what."""

import numpy as np
import pytest

from engine.errors import UserError
from tests.training.reporting.metric_rows import ROWS, write
from training.reporting import summary
from training.reporting.summary import plot_curves, smooth


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
    set_title, summary, scatter = Axes.set_title, Axes.plot, Axes.scatter

    def spy_title(axes, title, **options):
        titles.append(title)
        return set_title(axes, title, **options)

    def spy_plot(axes, x, y, *style, **options):
        if "label" in options:
            curves[titles[-1], options["label"]] = (list(x), list(y))
        return summary(axes, x, y, *style, **options)

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
        ("score against KL", "held out"): ([0.0, 2.0], [-0.5, 1.25]),
        ("score against KL", "held out, EMA"): ([1.5], [1.0]),
    }
    assert scatters == [([0.5], [0.25], [1])]  # the step with a NaN score has no dot


def test_no_scatter_without_a_step_that_has_both(monkeypatch, tmp_path):
    rows = [{"step": 1, "samples": 8, "objective/scores": 1.0}, {"step": 2, "samples": 16, "objective/kl": 1.0}]
    titles, _, scatters = _panels(monkeypatch, rows, tmp_path)
    assert titles == ["score", "KL to the reference"] and scatters == []


def test_plot_of_a_whole_run_has_six_panels(monkeypatch, tmp_path):
    metrics = {curve.metric for _, curves in summary.PANELS for curve in curves}
    rows = [{"step": step, "samples": 8 * step, **{name: float(step % 5) for name in metrics}} for step in range(40)]
    titles, curves, _ = _panels(monkeypatch, rows, tmp_path)
    assert titles == ["score", "KL to the reference", "score against KL", "response", "policy", "value"]
    assert len(curves) == len(metrics) + 2  # held out, and its EMA, are in score against KL, too
    assert curves["value", "loss"][1][10] == 2.0  # smoothed: 3 4 0 1 2
    assert curves["score", "held out"][1][11] == 1.0  # measured now and then: as it is


def test_plot_of_nothing_is_the_users_mistake(tmp_path):
    path = write(tmp_path / "metrics.jsonl", {"step": 0, "samples": 0, "policy/loss": None})
    with pytest.raises(UserError, match="metrics.jsonl: holds no metrics to draw"):
        plot_curves(path, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def _figure(monkeypatch, rows, tmp_path):
    """The figure of `plot_curves`: the axes of each panel by title, and those on the right of it by "title, right"."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    plot_curves(write(tmp_path / "metrics.jsonl", *rows), tmp_path / "curves.png")
    found = {}
    for axes in figures[0].axes:
        title = axes.get_title(loc="left")
        below = [name for name, other in found.items() if other.bbox.bounds == axes.bbox.bounds]
        found[title or f"{(below or ['colours'])[0]}, right"] = axes
    return figures[0], found


def test_held_out_points_have_bars_of_two_standard_errors(monkeypatch, tmp_path):
    errors = ({"eval/score_se": 0.25, "eval/kl_se": 0.0}, {}, {"eval/score_se": 0.5, "eval/kl_se": 0.125})
    rows = [row | error for row, error in zip(ROWS, errors, strict=True)]
    figure, panels = _figure(monkeypatch, rows, tmp_path)

    def bars(title: str) -> list[list[list[float]]]:
        """The ends of each bar, of all of its curves."""
        lines = [line for container in panels[title].containers for line in container.lines[2]]
        return [segment.tolist() for line in lines for segment in line.get_segments() if np.isfinite(segment).all()]

    assert bars("score") == [[[0.0, -1.0], [0.0, 0.0]], [[128.0, 0.25], [128.0, 2.25]]]
    assert [[0.0, 0.0], [0.0, 0.0]] in bars("KL to the reference")
    across, along = [[1.75, 1.25], [2.25, 1.25]], [[2.0, 0.25], [2.0, 2.25]]
    assert across in bars("score against KL") and along in bars("score against KL")
    assert figure.get_supxlabel() == "bars: 2 standard errors to either side"


def test_what_hardly_changes_is_a_flat_line(monkeypatch, tmp_path):
    def row(step, **metrics):
        names = {"kl_coef": "objective/kl_coef", "length": "rollout/response_length", "clipped": "policy/clipfrac"}
        return {"step": step, "samples": 8 * step} | {names[name]: value for name, value in metrics.items()}

    rows = [
        row(1, kl_coef=0.1, length=50.0, clipped=0.0) | {"objective/kl": 1.0, "value/loss": -2.0},
        row(2, kl_coef=0.1, length=50.4, clipped=0.0) | {"objective/kl": 3.0, "value/loss": -2.0},
    ]
    _, panels = _figure(monkeypatch, rows, tmp_path)
    assert panels["KL to the reference, right"].get_ylim() == pytest.approx((-0.00625, 0.125))
    assert panels["response"].get_ylim() == pytest.approx((-0.05 * 63, 63))
    assert panels["policy"].get_ylim() == pytest.approx((-0.0625, 1.25))
    assert panels["value"].get_ylim() == pytest.approx((-2.5, 0.125))
    low, high = panels["KL to the reference"].get_ylim()
    assert 0.7 < low < 1.0 and 3.0 < high < 3.3  # changes, and is drawn as it does


def test_a_mean_that_hardly_changes_shows_its_bars(monkeypatch, tmp_path):
    rows = [{"step": step, "samples": step, "eval/score": 1.0, "eval/score_se": 0.25} for step in (0, 1)]
    _, panels = _figure(monkeypatch, rows, tmp_path)
    low, high = panels["score"].get_ylim()
    assert 0.3 < low < 0.5 and 1.5 < high < 1.7
