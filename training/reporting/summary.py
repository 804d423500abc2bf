"""What a finished run shows: a picture of its curves, and a text with scores before and after and with its health.

    rows = read_metrics(output_dir / "metrics.jsonl")
    plot_curves(output_dir / "metrics.jsonl", output_dir / "curves.png")
    print(summary_text(RunSummary.from_metrics(rows, saved={"actor": actor_dir}, curves=output_dir / "curves.png")))

Both read metrics.jsonl and nothing else, so they also work on a run that was resumed, killed or is still going on.
The panels of the picture are one table, PANELS; what a run did not log is left out of it.
"""

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np

from engine.errors import UserError
from training.reporting.health import Finding, health
from training.reporting.sinks import read_lines

SMOOTH_FROM = 24
"""Curves with at least this many points are drawn faintly, with a running mean over them; shorter ones with dots."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of a panel. `dots`: measured now and then, never smoothed; `right`: on the right-hand axis."""

    metric: str
    label: str
    color: str
    dots: bool = False
    right: bool = False


BLUE, ORANGE, GREEN, RED, PURPLE = "#2f6db5", "#e07b1a", "#2e9257", "#c23b3b", "#7d55b0"

PANELS: tuple[tuple[str, tuple[Curve, ...]], ...] = (
    (
        "score",
        (
            Curve(metric="objective/scores", label="training prompts", color=BLUE),
            Curve(metric="eval/score", label="held out", color=ORANGE, dots=True),
            Curve(metric="eval/ema_score", label="held out, EMA", color=GREEN, dots=True),
        ),
    ),
    (
        "KL to the reference",
        (
            Curve(metric="objective/kl", label="training prompts", color=BLUE),
            Curve(metric="eval/kl", label="held out", color=ORANGE, dots=True),
            Curve(metric="eval/ema_kl", label="held out, EMA", color=GREEN, dots=True),
            Curve(metric="objective/kl_coef", label="coefficient", color=PURPLE, right=True),
        ),
    ),
    (
        "response",
        (
            Curve(metric="rollout/response_length", label="length (tokens)", color=BLUE),
            Curve(metric="rollout/eos_rate", label="EOS rate", color=ORANGE, right=True),
        ),
    ),
    (
        "policy",
        (
            Curve(metric="policy/loss", label="loss", color=BLUE),
            Curve(metric="policy/clipfrac", label="clip fraction", color=ORANGE, right=True),
            Curve(metric="policy/approxkl", label="approximate KL", color=GREEN, right=True),
        ),
    ),
    (
        "value",
        (
            Curve(metric="value/loss", label="loss", color=BLUE),
            Curve(metric="value/explained_variance", label="explained variance", color=ORANGE, right=True),
        ),
    ),
)
SCATTER = ("objective/kl", "objective/scores")
SCATTER_PLACE = 2
"""The place of the score-against-KL panel in the grid, after score and KL."""


def read_metrics(path: str | Path) -> list[dict]:
    """The records of a metrics.jsonl in the order written; null, which stands for a non-finite number, as NaN.

    Raises:
        UserError: no such file, or a line of it is no record of metrics.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; give the metrics.jsonl of a run")
    return [
        {name: math.nan if value is None else value for name, value in record.items()} for _, record in read_lines(path)
    ]


def plot_curves(metrics_path: str | Path, png_path: str | Path) -> None:
    """Draw the curves of a run, over the responses it had seen, into a PNG.

    Raises:
        UserError: the file is missing, or holds none of the metrics that are drawn.
    """
    # Without pyplot, so no window and no global state; imported here to spare every rank a second at its start.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_path)
    drawers = [(title, _draw_curves, curves) for title, curves in PANELS if any(_has(rows, c.metric) for c in curves)]
    if _has(rows, *SCATTER):
        drawers.insert(SCATTER_PLACE, ("score against KL", _draw_scatter, SCATTER))
    if not drawers:
        raise UserError(f"{metrics_path}: holds no metrics to draw; has the run finished a step?")
    figure = Figure(figsize=(15, 8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
    grid = figure.subplots(2, 3).flatten()
    for axes, (title, draw, what) in zip(grid, drawers):
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=22)
        axes.grid(True, color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, rows, what)
    for axes in grid[len(drawers) :]:
        axes.set_axis_off()
    figure.savefig(str(png_path), dpi=110)


def _has(rows: Sequence[Mapping], *metrics: str) -> bool:
    """Whether all of `metrics` are finite in at least one row."""
    return any(all(math.isfinite(row.get(metric, math.nan)) for metric in metrics) for row in rows)


def _series(rows: Sequence[Mapping], *metrics: str) -> list[np.ndarray]:
    """The columns of `metrics` for the rows where all of them are finite."""
    table = [[row.get(metric, math.nan) for metric in metrics] for row in rows]
    table = np.array([line for line in table if all(map(math.isfinite, line))], dtype=float)
    return list(table.T)


def _draw_curves(axes, rows: Sequence[Mapping], curves: Sequence[Curve]) -> None:
    present = [curve for curve in curves if _has(rows, curve.metric)]
    right = axes.twinx() if any(c.right for c in present) and not all(c.right for c in present) else axes
    handles = []
    for curve in present:
        x, y = _series(rows, "samples", curve.metric)
        target = right if curve.right else axes
        few = curve.dots or len(y) < SMOOTH_FROM
        if not few:
            target.plot(x, y, color=curve.color, linewidth=0.8, alpha=0.3)
            y = smooth(y)
        handles += target.plot(
            x,
            y,
            "o-" if few else "-",
            color=curve.color,
            label=curve.label,
            markersize=4,
            linewidth=1.2 if few else 1.8,
        )
    axes.set_xlabel("responses", fontsize=9)
    if right is not axes:
        right.spines["top"].set_visible(False)
        right.tick_params(labelsize=9)
        left_curves = [curve for curve in present if not curve.right]
        _label_axis(axes, left_curves if len(left_curves) == 1 else [])
        _label_axis(right, [curve for curve in present if curve.right])
    axes.margins(y=0.1)
    axes.legend(
        handles=handles,
        fontsize=8.5,
        frameon=False,
        ncols=4,
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.995),
        borderaxespad=0.2,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _label_axis(axes, curves: Sequence[Curve]) -> None:
    """Name what an axis measures, in the curve's colour where it is only one."""
    axes.set_ylabel(
        ", ".join(curve.label for curve in curves), fontsize=9, color=curves[0].color if len(curves) == 1 else "black"
    )


def _draw_scatter(axes, rows: Sequence[Mapping], metrics: tuple[str, str]) -> None:
    """One dot a step: how much score the policy bought with its distance from the reference, and when."""
    from matplotlib.ticker import MaxNLocator

    step, kl, score = _series(rows, "step", *metrics)
    dots = axes.scatter(kl, score, c=step, cmap="viridis", s=22, alpha=0.85, linewidths=0)
    axes.set_xlabel("KL to the reference", fontsize=9)
    axes.set_ylabel("score", fontsize=9)
    bar = axes.figure.colorbar(dots, cax=axes.inset_axes([1.02, 0.0, 0.035, 1.0]), ticks=MaxNLocator(integer=True))
    bar.set_label("step", fontsize=9)
    bar.ax.tick_params(labelsize=9)
    bar.outline.set_visible(False)


def smooth(values: np.ndarray) -> np.ndarray:
    """The centred running mean over a tenth of the values; at the ends over those that exist, nothing is invented."""
    half = len(values) // 20
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What the end of a run reports. `before` and `after` hold metrics named eval/..., on the held-out prompts.

    responses: how many the run learned from.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]
    steps: int
    responses: int
    phase_seconds: Mapping[str, float]
    findings: Sequence[Finding] = ()
    saved: Mapping[str, str | Path] = field(default_factory=dict)
    curves: str | Path | None = None

    @classmethod
    def from_metrics(
        cls, rows: Sequence[Mapping], *, saved: Mapping[str, str | Path] | None = None, curves: str | Path | None = None
    ) -> "RunSummary":
        """The summary of the records of a run: the evaluation of step 0 and the last one, responses and steps, each
        phase's total time, and health. What time/step holds beyond the other times is the phase "other".
        """
        evaluations = [row for row in rows if "eval/score" in row]
        first = [row for row in evaluations if row["step"] == 0]
        last = [row for row in evaluations if row["step"] > 0]
        names = sorted({name for row in rows for name in row if name.startswith("time/") and name != "time/step"})
        seconds = {name.removeprefix("time/"): sum(row.get(name, 0.0) for row in rows) for name in names}
        other = sum(row.get("time/step", 0.0) for row in rows) - sum(seconds.values())
        if round(other, 1) > 0:  # less is what rounding leaves, and would be shown as 0.0 s
            seconds["other"] = other
        return cls(
            before=_evaluation(first),
            after=_evaluation(last[-1:]),
            steps=max((row["step"] for row in rows), default=0),
            responses=max((row["samples"] for row in rows), default=0),
            phase_seconds=seconds,
            findings=health(rows),
            saved=saved or {},
            curves=curves,
        )


def _evaluation(rows: Sequence[Mapping]) -> dict[str, float]:
    return {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}


EVALUATED = (
    ("score", "score"),
    ("KL to the reference", "kl"),
    ("response length", "response_length"),
    ("distinct bigrams", "distinct_bigrams"),
)
"""The lines of the summary's first table: label, and metric behind eval/ (and behind eval/ema_ for the EMA)."""


COLUMNS = 100


def summary_text(summary: RunSummary) -> str:
    """The summary as plain text of at most COLUMNS, save where a path is longer: a path is never cut or broken."""
    blocks = [_evaluation_lines(summary), _health_lines(summary), _time_lines(summary), _path_lines(summary)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _evaluation_lines(summary: RunSummary) -> list[str]:
    names = [(label, f"eval/{key}", f"eval/ema_{key}") for label, key in EVALUATED]
    ema = any(name in summary.after for _, _, name in names)
    head = "EMA, after" if ema else ""
    lines = [f"{'held-out prompts':<24}{'before':>12}{'after':>12}{'change':>12}{head:>14}".rstrip()]
    for label, name, ema_name in names:
        before, after, averaged = summary.before.get(name), summary.after.get(name), summary.after.get(ema_name)
        if before is None and after is None:
            continue
        change = "" if before is None or after is None else f"{after - before:+.3f}"
        numbers = f"{_number(before):>12}{_number(after):>12}{change:>12}{_number(averaged):>14}"
        lines.append(f"  {label:<22}{numbers}".rstrip())
    return lines if len(lines) > 1 else ["held-out prompts: not evaluated"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _health_lines(summary: RunSummary) -> list[str]:
    lines = ["health"] if summary.findings else []
    for finding in summary.findings:
        lines += textwrap.wrap(
            f"{finding.severity:<7}{finding.text}",
            COLUMNS,
            initial_indent="  ",
            subsequent_indent=" " * 9,
            break_on_hyphens=False,
        )
    return lines


def _time_lines(summary: RunSummary) -> list[str]:
    total = sum(summary.phase_seconds.values())
    lines = [f"{summary.responses} responses in {summary.steps} steps, {timedelta(seconds=round(total))}"]
    for phase, seconds in summary.phase_seconds.items():
        share = seconds / total if total else 0.0
        lines.append(f"  {phase:<22}{seconds:>10.1f} s{share:>12.1%}")
    return lines


def _path_lines(summary: RunSummary) -> list[str]:
    paths = {**summary.saved, **({"curves": summary.curves} if summary.curves is not None else {})}
    width = max(map(len, paths), default=0) + 2
    return ["saved", *(f"  {name:<{width}}{_short(path)}" for name, path in paths.items())] if paths else []


def _short(path: str | Path) -> str:
    """`path` seen from the working directory where it lies below that."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative
