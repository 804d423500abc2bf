"""What a finished run says at its end: scores before and after, KL, time by phase, and its health.

    rows = read_metrics(output_dir / "metrics.jsonl")
    print(summary_text(RunSummary.from_metrics(rows, saved={"actor": actor_dir}, curves=output_dir / "curves.png")))

It reads metrics.jsonl and nothing else, so it also works on a run that was resumed, killed or is still going on.
"""

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from training.reporting.health import Finding, health


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
        phase's total time, and health. What of time/step is in none of the other times is the phase "other".
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
