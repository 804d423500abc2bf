"""Makes the summary at the end of a run (scores, KL, time by part, health) and a picture of the run's curves.

    rows = read_metrics(output_dir / "metrics.jsonl")
    plot_curves(output_dir / "metrics.jsonl", output_dir / "curves.png")
    print(summary_text(RunSummary.from_metrics(rows, saved={"actor": actor_dir}, curves=output_dir / "curves.png")))

Everything is read from metrics.jsonl alone. Therefore the summary and the picture can also be made of a run that was
resumed or killed, or is still running. The table PANELS defines the panels of the picture; metrics that a run did not
log are left out.
"""

import math
import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np

from engine.errors import UserError
from training.reporting.health import Finding, health
from training.reporting.records import METRICS_FILE, read_metrics
from training.reporting.standard_errors import ENDINGS, NOISE, scored_otherwise, with_error, within_noise
from training.runtime.stopping import unwritten_noted


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The content of the summary. before, after: the metrics eval/... on the held-out prompts, before the first step
    and at the last evaluation.

    responses: number of responses that the run learned from. phase_seconds: {part of the run: its seconds}, from
    `seconds_by_part`. other_reward: whether the scores before and after come from different rewards; if so, the score
    before is left out.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]
    steps: int
    responses: int
    phase_seconds: Mapping[str, float]
    findings: Sequence[Finding] = ()
    saved: Mapping[str, str | Path] = field(default_factory=dict)
    curves: str | Path | None = None
    other_reward: bool = False

    @classmethod
    def from_metrics(
        cls,
        rows: Sequence[Mapping],
        *,
        since: Mapping[str, float] | None = None,
        saved: Mapping[str, str | Path] | None = None,
        curves: str | Path | None = None,
    ) -> "RunSummary":
        """The summary of a run. rows: the records of its metrics.jsonl.

        since: the time that has passed since the last record, from `WallClock.take`. saved: {name of a saved model: its
        folder}. curves: path of the picture.
        """
        evaluations = [row for row in rows if "eval/score" in row]
        first = [row for row in evaluations if row["step"] == 0]
        last = [row for row in evaluations if row["step"] > 0]
        other_reward = any(map(scored_otherwise, last[-1:]))
        return cls(
            before=_evaluation(first, without=("eval/score", PART) if other_reward else ()),
            after=_evaluation(last[-1:]),
            steps=max((row["step"] for row in rows), default=0),
            responses=max((row["samples"] for row in rows), default=0),
            phase_seconds=seconds_by_part([*rows, since or {}]),
            findings=health(rows),
            saved=saved or {},
            curves=curves,
            other_reward=other_reward,
        )


def _evaluation(rows: Sequence[Mapping], without: tuple[str, ...] = ()) -> dict[str, float]:
    """The metrics of an evaluation, without those whose names begin with one of `without`."""
    found = {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}
    return {name: value for name, value in found.items() if not name.startswith(without)}


EVALUATED = (
    ("score", "score"),
    ("KL to the reference", "kl"),
    ("response length", "response_length"),
    ("distinct bigrams", "distinct_bigrams"),
    ("new words, share", "new_words"),
)
"""(label, metric) for each line of the summary's first table. The metric's full name is eval/METRIC for the actor and
eval/ema_METRIC for the EMA."""
PART = "eval/reward_"
"""The prefix of the metrics of a score's unweighted parts. Each part has a line below the score."""

COLUMNS = 100


def summary_text(summary: RunSummary) -> str:
    """The summary as plain text, in lines of at most COLUMNS characters. A line with a path may be longer, because a
    path is never cut or broken."""
    blocks = [
        _evaluation_lines(summary),
        _health_lines(summary),
        time_lines(f"{summary.responses} responses in {summary.steps} steps", summary.phase_seconds),
        _path_lines(summary),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _evaluation_lines(summary: RunSummary) -> list[str]:
    measured = dict.fromkeys([*summary.before, *summary.after])
    parts = [name.removeprefix(PART) for name in measured if name.startswith(PART) and not name.endswith(ENDINGS)]
    score, *others = EVALUATED
    shown = [score, *((f"reward {part}", f"reward_{part}") for part in parts), *others]
    names = [(label, f"eval/{key}", f"eval/ema_{key}") for label, key in shown]
    ema = any(name in summary.after for _, _, name in names)
    errors = any(f"{name}_se" in metrics for _, name, _ in names for metrics in (summary.before, summary.after))
    width, room = 18 if errors else 12, max(22, *(len(label) for label, _, _ in names))
    lines, unclear = [], []
    for label, name, ema_name in names:
        before, after = (_number(metrics, name) for metrics in (summary.before, summary.after))
        if not before and not after:
            continue
        averaged = _number(summary.after, ema_name)
        numbers = (before, after, _change(summary, name), averaged)
        lines.append(f"  {label:<{room}}{''.join(f' {number:>{width - 1}}' for number in numbers)}".rstrip())
        change, error = (summary.after.get(f"{name}_{what}") for what in ("change", "change_se"))
        if change is not None and error is not None and within_noise(change, error):
            unclear.append(label)
    if not lines:
        return ["held-out prompts: not evaluated"]
    columns = ("before", "after", "change", "EMA, after" if ema else "")
    lines.insert(0, f"{'held-out prompts':<{room + 2}}{''.join(f'{column:>{width}}' for column in columns)}".rstrip())
    if errors:
        lines.append("  ± is one standard error; a change's is paired, of the differences prompt by prompt")
    if summary.other_reward:
        lines.append("  the score is another reward's than before the run went on: it has no before and no change")
    if unclear:
        lines.append(f"  within noise ({NOISE:g} standard errors): the change of {', '.join(unclear)}")
    return lines


def _number(metrics: Mapping[str, float], name: str) -> str:
    return with_error(metrics[name], metrics.get(f"{name}_se")) if name in metrics else ""


def _change(summary: RunSummary, name: str) -> str:
    """A text with the change of a metric since before the first step. If the run was resumed in another folder, the
    first evaluation is not in this folder's metrics, and the change is read from the metric NAME_change."""
    if f"{name}_change" in summary.after:
        return with_error(summary.after[f"{name}_change"], summary.after.get(f"{name}_change_se"), sign="+")
    if name in summary.before and name in summary.after:
        return with_error(summary.after[name] - summary.before[name], None, sign="+")
    return ""


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


def _path_lines(summary: RunSummary) -> list[str]:
    paths = {**summary.saved, **({"curves": summary.curves} if summary.curves is not None else {})}
    width = max(map(len, paths), default=0) + 2
    return ["saved", *(f"  {name:<{width}}{_short(path)}" for name, path in paths.items())] if paths else []


def _short(path: str | Path) -> str:
    """`path`, relative to the working directory if it lies below that directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


# The time of each part.

# {last part of the name of a metric time/...: text for the reader}, for the parts of a run outside of its steps.
BEFORE = {"redone": "steps done again", "start": "start-up", "critic_pretrain": "critic's pretraining"}
BETWEEN = {
    "evaluate": "evaluations",
    "checkpoint": "checkpoints",
    "normalize": "normalisation",
    "save": "saving models",
}


def seconds_by_part(rows: Sequence[Mapping]) -> dict[str, float]:
    """{part of a run: its seconds}, in the order in which they are shown. The seconds add up to the whole time.

    The time of a phase is that of its slowest rank. Therefore the phases may add up to more than the time of the steps;
    they are then scaled down to it. Time that belongs to no part is called "other"."""
    totals = Counter()
    for row in rows:
        totals.update({name.removeprefix("time/"): row[name] for name in row if name.startswith("time/")})
    whole, steps = totals.pop("wall", 0.0), totals.pop("step", 0.0)
    before, between = ({name: totals.pop(name) for name in names if name in totals} for names in (BEFORE, BETWEEN))
    inside = dict(sorted(totals.items())) or ({"train": steps} if steps else {})
    scale = min(1.0, steps / sum(inside.values())) if steps else 1.0
    parts = before | {name: seconds * scale for name, seconds in inside.items()} | between
    other = whole - sum(parts.values())
    if round(other, 1) > 0:  # less is a rounding error, shown as 0.0 s
        parts["other"] = other
    return parts


def time_lines(what: str, parts: Mapping[str, float]) -> list[str]:
    """A line with `what` and how long it took in all, and a line for each part with its seconds and its share."""
    total = sum(parts.values())
    lines = [f"{what}, {timedelta(seconds=round(total))}"]
    for name, seconds in parts.items():
        label = (BEFORE | BETWEEN).get(name, name)
        lines.append(f"  {label:<22}{seconds:>10.1f} s{seconds / total if total else 0.0:>12.1%}")
    return lines


# The curves.

SMOOTH_FROM = 24
"""Curves with at least this many points are drawn faintly, with a moving average over them; shorter curves are drawn
with dots."""
FLAT = 0.01
"""If values differ by less than this share of the largest value, they are drawn on an axis that begins at 0, so that
they look flat."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of a panel. dots: whether it is drawn as dots and not smoothed, because it is measured only now and
    then. right: whether it belongs to the right-hand axis."""

    metric: str
    label: str
    color: str
    dots: bool = False
    right: bool = False


BLUE, ORANGE, GREEN, PURPLE = "#2f6db5", "#e07b1a", "#2e9257", "#7d55b0"

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
HELD_OUT_SCATTER = (
    ("eval/kl", "eval/score", "held out", ORANGE),
    ("eval/ema_kl", "eval/ema_score", "held out, EMA", GREEN),
)
SCATTER_PLACE = 2
"""The place in the grid of the panel that draws the score over the KL: after the panels of score and KL."""


def plot_curves(metrics_path: str | Path, png_path: str | Path) -> None:
    """Draw the curves of a run into a PNG. The horizontal axis is the number of responses that the run had seen.

    Raises:
        UserError: the file of metrics is missing, or has none of the metrics that are drawn.
    """
    # pyplot is not used, because it has global state and may open windows. The import takes a second, so it is done
    # here and not at the start of every rank.
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
    if any(_has(rows, curve.metric, f"{curve.metric}_se") for _, curves in PANELS for curve in curves):
        figure.supxlabel(f"bars: {NOISE:g} standard errors to either side", fontsize=9, x=0.01, ha="left")
    figure.savefig(str(png_path), dpi=110)


def _has(rows: Sequence[Mapping], *metrics: str) -> bool:
    """Whether all of `metrics` are finite in at least one row."""
    return any(all(math.isfinite(row.get(metric, math.nan)) for metric in metrics) for row in rows)


def _series(rows: Sequence[Mapping], *metrics: str) -> list[np.ndarray]:
    """An array for each of `metrics`: its values in the rows where all of `metrics` are finite."""
    table = [[row.get(metric, math.nan) for metric in metrics] for row in rows]
    table = np.array([line for line in table if all(map(math.isfinite, line))], dtype=float)
    return list(table.T)


def _bars(rows: Sequence[Mapping], metric: str, *others: str) -> np.ndarray:
    """Half the length of the error bar of `metric`, for each row in which `metric` and `others` are finite; NaN if no
    error was measured."""
    rows = [row for row in rows if _has([row], metric, *others)]
    return NOISE * np.array([row.get(f"{metric}_se", math.nan) for row in rows], dtype=float)


def _ends(rows: Sequence[Mapping], metric: str) -> np.ndarray:
    """Both ends of each error bar of `metric`; for a value without an error bar, the value itself."""
    (values,) = _series(rows, metric)
    bars = np.nan_to_num(_bars(rows, metric))
    return np.concatenate([values - bars, values + bars])


def _draw_curves(axes, rows: Sequence[Mapping], curves: Sequence[Curve]) -> None:
    present = [curve for curve in curves if _has(rows, curve.metric)]
    right = axes.twinx() if any(c.right for c in present) and not all(c.right for c in present) else axes
    handles = []
    for target in dict.fromkeys((axes, right)):
        own = [curve for curve in present if right is axes or curve.right == (target is right)]
        handles += [_draw_curve(target, rows, curve) for curve in own]
        target.margins(y=0.1)
        _keep_flat(target.set_ylim, *(_ends(rows, curve.metric) for curve in own))
    axes.set_xlabel("responses", fontsize=9)
    if right is not axes:
        right.spines["top"].set_visible(False)
        right.tick_params(labelsize=9)
        left_curves = [curve for curve in present if not curve.right]
        _label_axis(axes, left_curves if len(left_curves) == 1 else [])
        _label_axis(right, [curve for curve in present if curve.right])
    _legend(axes, handles)


def _draw_curve(axes, rows: Sequence[Mapping], curve: Curve):
    """Draw one curve; returns the object that represents it in the legend."""
    x, y = _series(rows, "samples", curve.metric)
    bars = _bars(rows, curve.metric)
    if np.isfinite(bars).any():
        axes.errorbar(x, y, yerr=bars, fmt="none", ecolor=curve.color, elinewidth=1.0, capsize=2.5)
    few = curve.dots or len(y) < SMOOTH_FROM
    if not few:
        axes.plot(x, y, color=curve.color, linewidth=0.8, alpha=0.3)
        y = smooth(y)
    style, width = ("o-", 1.2) if few else ("-", 1.8)
    (line,) = axes.plot(x, y, style, color=curve.color, label=curve.label, markersize=4, linewidth=width)
    return line


def _keep_flat(set_limits, *values: np.ndarray) -> None:
    """If the values of an axis hardly differ (FLAT), set its limits to 0 and a little beyond the values."""
    together = np.concatenate(values)
    low, high = together.min(), together.max()
    size = max(abs(low), abs(high))
    if high - low <= FLAT * size:
        far = 1.25 * (size or 1.0)
        set_limits((-far, 0.05 * far) if high < 0 else (-0.05 * far, far))


def _legend(axes, handles: Sequence) -> None:
    """Draw a panel's legend, in the line under its title."""
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
    """Label an axis. If it has a single curve, the label has the curve's colour."""
    axes.set_ylabel(
        ", ".join(curve.label for curve in curves), fontsize=9, color=curves[0].color if len(curves) == 1 else "black"
    )


def _draw_scatter(axes, rows: Sequence[Mapping], metrics: tuple[str, str]) -> None:
    """Draw the score over the KL to the reference: for training, a dot for each step, whose colour shows the step; for
    the held-out prompts, a line."""
    from matplotlib.ticker import MaxNLocator

    step, kl, score = _series(rows, "step", *metrics)
    dots = axes.scatter(kl, score, c=step, cmap="viridis", s=22, alpha=0.85, linewidths=0, label="training prompts")
    handles = [dots]
    held_out = [what for what in HELD_OUT_SCATTER if _has(rows, *what[:2])]
    for kl_metric, score_metric, label, color in held_out:
        x, y = _series(rows, kl_metric, score_metric)
        bars = {"xerr": _bars(rows, kl_metric, score_metric), "yerr": _bars(rows, score_metric, kl_metric)}
        if np.isfinite(bars["yerr"]).any():
            axes.errorbar(x, y, **bars, fmt="none", ecolor=color, elinewidth=1.0, capsize=2.5)
        handles += axes.plot(x, y, "o-", color=color, label=label, markersize=4, linewidth=1.2)
    axes.margins(0.1)
    for set_limits, place in ((axes.set_xlim, 0), (axes.set_ylim, 1)):
        _keep_flat(set_limits, *(_ends(rows, what[place]) for what in (metrics, *held_out)))
    _legend(axes, handles)
    axes.set_xlabel("KL to the reference", fontsize=9)
    axes.set_ylabel("score", fontsize=9)
    bar = axes.figure.colorbar(dots, cax=axes.inset_axes([1.02, 0.0, 0.035, 1.0]), ticks=MaxNLocator(integer=True))
    bar.set_label("step", fontsize=9)
    bar.ax.tick_params(labelsize=9)
    bar.outline.set_visible(False)


def smooth(values: np.ndarray) -> np.ndarray:
    """The centred moving average over a window of a tenth of the values. At both ends the window is shorter."""
    half = len(values) // 20
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def tell_result(output_dir: Path, saved: Mapping[str, Path], since: Mapping[str, float]) -> None:
    """Draw the curves of a run of step 3 and print its summary (one process calls this). since: the time since the last
    line of metrics.jsonl, as metrics."""
    metrics, curves = output_dir / METRICS_FILE, output_dir / "curves.png"
    with unwritten_noted(curves):
        plot_curves(metrics, curves)
    with unwritten_noted("the summary"):
        summary = RunSummary.from_metrics(
            read_metrics(metrics), since=since, saved=saved, curves=curves if curves.exists() else None
        )
        page = f"all of it as a page to send: python -m training.report {output_dir}"
        print(f"\n{summary_text(summary)}\n\n{page}", flush=True)
