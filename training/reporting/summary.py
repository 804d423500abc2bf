"""What a finished run says at its end: scores before and after, KL, time by phase, and its health.

    rows = read_metrics(output_dir / "metrics.jsonl")
    print(summary_text(RunSummary.from_metrics(rows, saved={"actor": actor_dir}, curves=output_dir / "curves.png")))

It reads metrics.jsonl and nothing else, so it also works on a run that was resumed, killed or is still going on.
"""

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from training.reporting.health import Finding, health
from training.reporting.standard_errors import ENDINGS, NOISE, scored_otherwise, with_error, within_noise
from training.reporting.wall_clock import seconds_by_part, time_lines


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What the end of a run reports. `before` and `after` hold metrics named eval/..., on the held-out prompts.

    responses: how many the run learned from. phase_seconds: of each part, by `seconds_by_part`. other_reward: whether
    the score after is another reward's than the one before, which is then left out.
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
        """The summary of the records of a run: the evaluation of step 0 and the last one, responses and steps, the time
        of each part, and health.

        since: what passed since the last record, as `WallClock.take` gives it.
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
    """Its metrics, but those whose names begin so."""
    found = {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}
    return {name: value for name, value in found.items() if not name.startswith(without)}


EVALUATED = (
    ("score", "score"),
    ("KL to the reference", "kl"),
    ("response length", "response_length"),
    ("distinct bigrams", "distinct_bigrams"),
    ("new words, share", "new_words"),
)
"""The lines of the summary's first table: label, and metric behind eval/ (and behind eval/ema_ for the EMA)."""
PART = "eval/reward_"
"""Metrics of what each part of a score says, before its weight, begin so. Each has a line below the score."""

COLUMNS = 100


def summary_text(summary: RunSummary) -> str:
    """The summary as plain text of at most COLUMNS, save where a path is longer: a path is never cut or broken."""
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
    """Of a metric since before the first step, which stands elsewhere where a run went on in another folder."""
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
    """`path` seen from the working directory where it lies below that."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative
