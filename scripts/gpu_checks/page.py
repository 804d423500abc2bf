"""The page of what was found: what to act on, the checks, and all figures."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmark_report import markdown
from scripts.gpu_checks.check import FAIL, Outcome, lines_of, outcomes_of

PAGE = "findings.md"


class Followed:
    """Prints each line that is new in an output folder, and keeps the folder's page in step with them."""

    def __init__(self, output: Path, dry: bool):
        self.output = output
        self.dry = dry
        self.printed = 0

    def __call__(self) -> None:
        lines = lines_of(self.output)
        for line in lines[self.printed :]:
            print(json.dumps(line), flush=True)
        if len(lines) > self.printed:
            self.printed, whole = len(lines), self.output / f"{PAGE}.part"
            outcomes = outcomes_of(lines)
            whole.write_text("\n".join([*to_act_on(outcomes, self.dry), *all_figures(outcomes)]) + "\n")
            whole.rename(self.output / PAGE)


def to_act_on(outcomes: Sequence[Outcome], dry: bool) -> list[str]:
    """Checks that did not come to their end, failures, then findings, each with what it means and what to change; and a
    row for each check."""
    lines = ["# What scripts/check_gpu.sh found", ""]
    if dry:
        lines += ["A dry run on a CPU, with tiny models: it says nothing about a GPU.", ""]
    rows = [("check", "found", "what it means, and what to change")]
    rows += [(found.name, f"**{found.why}**", "") for found in outcomes if found.status == FAIL and not found.done]
    for kind in ("failures", "findings"):
        rows += [
            (found.name, f"**{what}**" if kind == "failures" else what, then)
            for found in outcomes
            for what, then in getattr(found, kind).items()
        ]
    lines += ["## To act on", "", *(markdown(_in_cells(rows)) if len(rows) > 1 else ["Nothing."]), ""]
    checks = [("check", "result", "s", "of them for the first time", "why")]
    checks += [
        (found.name, found.status, f"{found.seconds:.0f}", f"{found.first:.0f}", found.why) for found in outcomes
    ]
    counted = Counter(found.status for found in outcomes)
    counts = ", ".join(f"{number} {status}" for status, number in counted.items())
    return [*lines, "## Checks", "", *markdown(_in_cells(checks)), "", counts, ""]


def all_figures(outcomes: Sequence[Outcome]) -> list[str]:
    """A section for each check that has measured something or left something out."""
    lines = []
    for found in outcomes:
        rows = [("figure", ""), *((name, _words(value)) for name, value in found.figures.items())]
        if found.left_out:
            rows.append(("needs a GPU and was left out", ", ".join(found.left_out)))
        if len(rows) > 1:
            lines += [f"## {found.name}", "", *markdown(_in_cells(rows)), ""]
    return lines


def _in_cells(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[" ".join(cell.replace("|", "/").split()) for cell in row] for row in rows]


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
