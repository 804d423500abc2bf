"""A task's results as tables and a picture, and where docs/ shows them (PAGES).

The program writes into a page between two marks, and beside it the pictures and the numbers.
"""

import math
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from engine.errors import UserError
from scripts.comparison.entries import LINE
from scripts.comparison.frontier import (
    Band,
    Point,
    band,
    best_place_under,
    best_score_under,
    curve,
    place_of,
    read_at,
    score_at,
)
from scripts.comparison.results import Compared, Results
from scripts.comparison.tasks import TASKS, Task
from scripts.harness import ROOT

VARIETY = {"distinct_bigrams": "bigrams a token", "known_words": "known words"}
"""Measures by which responses that became alike are told, and invented words, and what columns call them."""

LAST = {"score": ("last score", 2), "kl": ("last KL", 1)}
"""What is shown of a run's last evaluation: its column, and with how many digits."""


def number(values: Band | None, of: int, digits: int = 2) -> str:
    """Mean and standard error, and how many of the runs came so far where not all did."""
    if values is None:
        return "-"
    error = "" if values.error is None else f" ± {values.error:.{digits}f}"
    return f"{values.mean:.{digits}f}{error}" + (f", {values.count} of {of}" if values.count < of else "")


def best_under(compared: Compared, kl: float) -> Band | None:
    """The best score at no more than this KL, over the seeds."""
    return band([best_score_under(course, kl) for course in compared.courses])


def ordered(entries: Sequence[Compared], kl: float) -> list[Compared]:
    """The best at no more than this KL first, those that were above it throughout last."""

    def key(compared: Compared) -> tuple[bool, float]:
        found = best_under(compared, kl)
        return found is None, -(found.mean if found else 0.0)

    return sorted(entries, key=key)


def main_table(task: Task, entries: Sequence[Compared]) -> str:
    """A line an entry, and one of the SFT model."""
    found = [_of_entry(task, compared) for compared in ordered(entries, task.search_kl)]
    first = next(iter(entries[0].results.values())).evaluations[0]
    sft = {"": "the SFT model", "last score": f"{first['score']:.2f}", "last KL": "0.0"}
    sft |= {f"{what} there": f"{first[name]:.3f}" for name, what in VARIETY.items()}
    return _table(list(found[0]), [[row.get(column, "-") for column in found[0]] for row in (*found, sft)])


def brief_table(task: Task, entries: Sequence[Compared]) -> str:
    """What the page shows of `main_table`; the pictures and the numbers beside the page have the rest."""
    columns = ["", "rate", "CPU s", f"best up to KL {task.search_kl:g}", "last score", "last KL"]
    found = [_of_entry(task, compared) for compared in ordered(entries, task.search_kl)]
    return _table(columns, [[row[column] for column in columns] for row in found])


def _of_entry(task: Task, compared: Compared) -> dict[str, str]:
    """{column: what it says of an entry}."""
    results = list(compared.results.values())
    rows = [result.rows(compared.line) for result in results]
    found = {"": f"`{compared.label}`", "rate": f"{compared.search.chosen:g}"}
    found |= {"drawn": f"{fmean(r.responses for r in results):.0f}"}
    found |= {"CPU s": f"{fmean(r.cpu_seconds for r in results):.0f}"}
    for kl in task.kls:
        found[f"at KL {kl:g}"] = number(band([score_at(course, kl) for course in compared.courses]), len(rows))
    for name, (what, digits) in LAST.items():
        found[what] = number(band([row[-1][name] for row in rows]), len(rows), digits)
    found[f"best up to KL {task.search_kl:g}"] = number(best_under(compared, task.search_kl), len(rows))
    places = [best_place_under(course, task.search_kl) for course in compared.courses]
    return found | {
        f"{what} there": number(_measured(rows, name, places), len(rows), 3) for name, what in VARIETY.items()
    }


def judged_table(task: Task, entries: Sequence[Compared]) -> str:
    """The judge's measure and, in brackets, the reward model's at each KL, where the course has it with the best value
    of the judge; and where the judge is best of all."""
    columns = ["", "rate", *(f"KL {kl:g}" for kl in task.kls), "best by the judge", "its KL", "bigrams there"]
    lines = []
    for compared in ordered(entries, task.search_kl):
        rows = [result.rows(compared.line) for result in compared.results.values()]
        best = [best_place_under(course, math.inf) for course in compared.courses]
        cells = [f"`{compared.label}`", f"{compared.search.chosen:g}"]
        for places in (*([place_of(course, kl) for course in compared.courses] for kl in task.kls), best):
            judged, score = (_measured(rows, measure, places) for measure in ("judge", "score"))
            cells.append(number(judged, len(rows)) + (f" ({score.mean:.2f})" if score else ""))
        cells += [number(_measured(rows, "kl", best), len(rows), 1)]
        cells += [number(_measured(rows, "distinct_bigrams", best), len(rows))]
        lines.append(cells)
    return _table(columns, lines)


def _measured(rows: Sequence[Sequence[dict[str, float]]], name: str, places: Sequence[float | None]) -> Band | None:
    """One measure at a place of each course, over the seeds."""
    return band(
        [
            None if place is None else read_at([point[name] for point in row], place)
            for row, place in zip(rows, places, strict=True)
        ]
    )


def search_table(entries: Sequence[Compared], rates: Sequence[float]) -> str:
    """What the search found: the best score under its KL at each rate, the chosen one in bold."""
    lines = []
    for compared in entries:
        cells = []
        for rate in rates:
            score = compared.search.scores.get(rate)
            cell = "-" if score is None else f"{score:.2f}"
            cells.append(f"**{cell}**" if rate == compared.search.chosen else cell)
        lines.append([f"`{compared.label}`", *cells, f"{compared.search.cpu_seconds:.0f}"])
    return _table(["", *(f"rate {rate:g}" for rate in rates), "CPU s"], lines)


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *lines))


def broken_off(entries: Sequence[Compared]) -> list[str]:
    """A sentence for each run that did not come to its end."""
    return [
        f"`{compared.label}`, seed {seed}, broke off after {result.responses} responses: {result.why}"
        for compared in entries
        for seed, result in compared.results.items()
        if not result.ended
    ]


PAGES = {"score": ROOT / "docs" / "comparison_tables.md", "judge": ROOT / "docs" / "comparison_judged.md"}
"""By what is compared the page that has the tables."""
PUBLISHED = ROOT / "docs" / "comparison.jsonl"
BEGIN, END = "<!-- made by scripts/compare_dialects.py -->", "<!-- made so far -->"


def section(task: Task, entries: Sequence[Compared], picture: str, brief: bool = False) -> str:
    """A task's part of the page: table and curves; also the command and what the search found, unless it is brief."""
    seeds = sorted({seed for compared in entries for seed in compared.results})
    # Runs may be read twice, by their courses and on the line.
    runs = {
        (compared.label.removesuffix(LINE), compared.search.chosen, seed): result
        for compared in entries
        for seed, result in compared.results.items()
    }
    searches = {compared.label.removesuffix(LINE): compared.search for compared in entries}
    used = sum(each.cpu_seconds for each in (*runs.values(), *searches.values()))
    command = ["python scripts/compare_dialects.py", *(shlex.quote(compared.label) for compared in entries)]
    command += ["--tasks", task.name, "--seeds", *map(str, seeds), *budget_words(task)]
    fewer = [f"`{compared.label}`" for compared in entries if len(compared.results) < len(seeds)]
    folded = textwrap.fill(" ".join(command), 118, subsequent_indent="    ", break_long_words=False)
    learned = (
        f"Entries: {len(entries)}; seeds: {', '.join(map(str, seeds))}. Each run learns from "
        f"{task.steps * task.responses:,} responses in {task.steps} steps, evaluated every {task.every}. "
        f"{used / 60:.0f} CPU minutes in all, the search included."
        + (f" Fewer seeds: {', '.join(fewer)}." if fewer else "")
        + (_of_sft(entries[0]) if task.judge else "")
    )
    lines = [
        f"## {task.name}: {task.what}",
        "",
        *([] if brief else ["```bash", folded.replace("\n", " \\\n"), "```", ""]),
        textwrap.fill(learned, 120, break_long_words=False),
        "",
        judged_table(task, entries)
        if task.judge
        else brief_table(task, entries)
        if brief
        else main_table(task, entries),
        "",
        *(line for sentence in broken_off(entries) for line in (sentence, "")),
        f"![{'Reward model and judge' if task.judge else 'Score'} against KL of all entries on {task.name}]({picture})",
    ]
    if not brief:
        searched = f"The search: the best score at a KL of at most {task.search_kl:g}, with a seed of its own."
        lines += ["", searched, "", search_table(entries, task.rates)]
    return "\n".join(lines)


def _of_sft(compared: Compared) -> str:
    """What the numbers of a judged task are relative to."""
    first = next(iter(compared.results.values())).evaluations[0]
    return (
        f" The judge gives the SFT model {first['judge']:.2f}, standard deviation {first['judge_std']:.2f}: "
        f"0 and 1 here. They have {first['distinct_bigrams']:.3f} distinct bigrams a token."
    )


def budget_words(task: Task) -> list[str]:
    """The flags of a budget or of rates that are not the task's usual ones."""
    usual, rates = TASKS[task.name], " ".join(f"{rate:g}" for rate in task.rates)
    return [
        *([f"--steps {task.steps}"] if task.steps != usual.steps else []),
        *([f"--responses {task.responses}"] if task.responses != usual.responses else []),
        *([f"--rates {rates}"] if task.rates != usual.rates else []),
    ]


def plot(task: Task, entries: Sequence[Compared], path: Path) -> None:
    """Score, and a judge's value, against KL: the mean over the seeds of each entry, in a band of one standard error to
    either side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {"score": "reward model", "judge": "judge"} if task.judge else {"score": "held-out score"}
    figure, panels = pyplot.subplots(1, len(shown), figsize=(9 + 4 * (len(shown) - 1), 5.5), squeeze=False)
    figure.set_layout_engine("constrained")
    for axes, (measure, what) in zip(panels[0], shown.items(), strict=True):
        reach = 0.0
        for place, compared in enumerate(ordered(entries, task.search_kl)):
            reach = max(reach, _draw(axes, compared.courses_of(measure), compared.label, place))
        axes.set(xlabel="KL to the SFT model, nats a response", ylabel=what, title=task.name)
        axes.set_xlim(0, min(reach, 2 * max(task.kls)))
        axes.grid(alpha=0.3)
    panels[0][-1].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw(axes, courses: Sequence[Sequence[Point]], label: str, place: int) -> float:
    """One entry's curve, in the color and style of its place; returns the KL to which it goes."""
    from matplotlib import pyplot

    bands = curve(courses)
    kls, means = [kl for kl, _ in bands], [values.mean for _, values in bands]
    errors = [values.error or 0.0 for _, values in bands]
    colors, styles = pyplot.get_cmap("tab10").colors, ("-", "--", ":")
    color, style = colors[place % len(colors)], styles[place // len(colors) % len(styles)]
    axes.plot(kls, means, style, color=color, linewidth=1.4, label=label)
    low, high = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
    axes.fill_between(kls, low, high, color=color, alpha=0.15, linewidth=0)
    return max(kls, default=0.0)


def make(results: Results, tasks: Sequence[Task], folder: Path, prefix: str = "", brief: bool = False) -> str:
    """All sections, in Markdown, with pictures in `folder` whose names begin with `prefix`."""
    sections = []
    for task in tasks:
        entries = results.of(task)
        if entries:
            picture = f"{prefix}{task.name}.png"
            plot(task, entries, folder / picture)
            sections.append(section(task, entries, picture, brief))
    return "\n\n".join(sections)


def between_marks(page: Path, made: str) -> str:
    """The page's text with what stands between the two marks replaced; raises UserError unless each is there once."""
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(f"{page}: what is made goes between the lines {BEGIN!r} and {END!r}, once each. Put them back.")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n\n{made}\n\n{text[end:]}"


def write(results: Results, tasks: Sequence[Task]) -> None:
    """Put the sections into their pages, of these results and of those that were written there before, and their
    pictures and all numbers beside them."""
    published = Results(PUBLISHED)
    published.take(results)
    for measure, page in PAGES.items():
        shown = [task for task in tasks if task.measure == measure]
        if shown:
            made = make(published, shown, page.parent, "comparison_", brief=True)
            page.write_text(between_marks(page, made), encoding="utf-8")
