"""Makes the summary at the end of a run: scores, KL, health, time by part.

    rows = read_metrics(output_dir / "metrics.jsonl")
    print(summary_text(RunSummary.from_metrics(rows, saved={"actor": actor_dir})))

Everything is read from metrics.jsonl alone. Therefore the summary can also be made of a run that was resumed or killed,
or is still running.
"""

import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from training.reporting.health import Finding, health
from training.reporting.run_record import METRICS_FILE, read_metrics
from training.reporting.standard_errors import ENDINGS, NOISE, cell, change_cell, evaluations, noisy, scored_otherwise
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
    other_reward: bool = False

    @classmethod
    def from_metrics(
        cls,
        rows: Sequence[Mapping],
        *,
        since: Mapping[str, float] | None = None,
        saved: Mapping[str, str | Path] | None = None,
    ) -> "RunSummary":
        """The summary of a run. rows: the records of its metrics.jsonl.

        since: the time that has passed since the last record, from `WallClock.take`. saved: {name of a saved model: its
        folder}.
        """
        first, last = evaluations(rows, ["eval/score"])
        other_reward = scored_otherwise(last)
        return cls(
            before=_evaluation(first, without=("eval/score", PART) if other_reward else ()),
            after=_evaluation(last),
            steps=max((row["step"] for row in rows), default=0),
            responses=max((row["samples"] for row in rows), default=0),
            phase_seconds=seconds_by_part([*rows, since or {}]),
            findings=health(rows),
            saved=saved or {},
            other_reward=other_reward,
        )


def _evaluation(row: Mapping, without: tuple[str, ...] = ()) -> dict[str, float]:
    """The metrics of an evaluation, without those whose names begin with one of `without`."""
    return {name: value for name, value in row.items() if name.startswith("eval/") and not name.startswith(without)}


EVALUATED = (
    ("score", "score"),
    ("KL to the reference", "kl"),
    ("response length", "response_length"),
    ("distinct bigrams", "distinct_bigrams"),
    ("new words, share", "new_words"),
    ("likelihood a token", "likelihood"),
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
        before, after = (cell(metrics, name) for metrics in (summary.before, summary.after))
        if not before and not after:
            continue
        numbers = (before, after, change_cell(summary.before, summary.after, name), cell(summary.after, ema_name))
        lines.append(f"  {label:<{room}}{''.join(f' {number:>{width - 1}}' for number in numbers)}".rstrip())
        if noisy(summary.after, name):
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
    width = max(map(len, summary.saved), default=0) + 2
    lines = [f"  {name:<{width}}{_short(path)}" for name, path in summary.saved.items()]
    return ["saved", *lines] if lines else []


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


def tell_result(output_dir: Path, saved: Mapping[str, Path], since: Mapping[str, float]) -> None:
    """Print the summary of a run of step 3 (one process calls this). since: the time since the last line of
    metrics.jsonl, as metrics."""
    with unwritten_noted("the summary"):
        summary = RunSummary.from_metrics(read_metrics(output_dir / METRICS_FILE), since=since, saved=saved)
        page = f"curves and samples as a page to send: four-engine-rlhf report {output_dir}"
        print(f"\n{summary_text(summary)}\n\n{page}", flush=True)
