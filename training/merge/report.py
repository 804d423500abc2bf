"""What was measured at each scale as a table, a picture of the frontier, and JSON."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from engine.whole_files import write_whole
from training.merge.frontier import Point
from training.reporting.plot import BLUE, ORANGE
from training.reporting.standard_errors import NOISE

TABLE, PICTURE = "frontier.json", "frontier.png"


def table(points: Sequence[Point], chosen: float | None = None) -> str:
    """A line for each scale, in columns; the chosen one is marked."""
    head = ("scale", "score", "", "KL", "", "tokens", "bigrams", "known", "")
    lines = [
        (
            f"{point.scale:g}",
            f"{point.score:.3f}",
            f"± {NOISE * point.score_se:.3f}",
            f"{point.kl:.2f}".replace("-0.00", "0.00"),  # of a model to itself, within rounding
            f"± {NOISE * point.kl_se:.2f}",
            f"{point.tokens:.1f}",
            f"{point.bigrams:.3f}",
            f"{point.known:.1%}",
            "saved" if point.scale == chosen else "the SFT model" if point.scale == 0.0 else "",
        )
        for point in points
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (head, *lines)]
    note = (
        f"KL: nats a response, to the SFT model; ±: {NOISE:g} standard errors; bigrams: distinct pairs of words, a "
        "token; known: share of words that occur in the prompts and the known texts"
    )
    return "\n".join([*(row.rstrip() for row in rows), note])


def write_points(path: Path, points: Sequence[Point], source: dict) -> None:
    """Write what was measured so far as JSON; source: what was merged. Raises: OSError."""
    found = {**source, "points": [dataclasses.asdict(point) for point in points]}
    write_whole(path, json.dumps(found, indent=2) + "\n")


def draw(points: Sequence[Point], path: Path) -> None:
    """Score over KL, a point for each scale, and beside it the variety; a PNG."""
    # Without pyplot, so no window and no global state; imported here to spare every rank a second at its start.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    score, variety = figure.subplots(1, 2)
    kl = [point.kl for point in points]
    bars = {"xerr": [NOISE * point.kl_se for point in points], "yerr": [NOISE * point.score_se for point in points]}
    score.errorbar(kl, [point.score for point in points], **bars, color=BLUE, marker="o", linewidth=1.2, capsize=2)
    for point in points:
        score.annotate(
            f"{point.scale:g}", (point.kl, point.score), textcoords="offset points", xytext=(6, -11), fontsize=9
        )
    score.set_ylabel("score")
    score.set_title("score against KL, by scale", loc="left", fontweight="bold")
    variety.plot(kl, [point.bigrams for point in points], color=BLUE, marker="o", label="distinct bigrams, a token")
    variety.plot(kl, [point.known for point in points], color=ORANGE, marker="o", label="share of known words")
    variety.set_ylim(bottom=0.0)
    variety.legend(frameon=False)
    variety.set_title("variety", loc="left", fontweight="bold")
    for axes in (score, variety):
        axes.set_xlabel("KL to the SFT model, nats a response")
        axes.grid(True, color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"bars: {NOISE:g} standard errors to either side", fontsize=9, x=0.01, ha="left")
    figure.savefig(str(path), dpi=110)
