"""A task's results as tables in Markdown."""

from collections.abc import Sequence
from statistics import fmean

from scripts.comparison.frontier import Band, band, best_place_under, best_score_under, read_at, score_at
from scripts.comparison.results import Compared
from scripts.comparison.tasks import Task

VARIETY = {"distinct_bigrams": "bigrams a token", "known_words": "known words"}
"""Measures by which responses that became alike are told, and invented words, and what columns call them."""


def number(values: Band | None, of: int, digits: int = 2) -> str:
    """Mean and standard error, and how many of the runs came so far where not all did."""
    if values is None:
        return "-"
    error = "" if values.error is None else f" ± {values.error:.{digits}f}"
    return f"{values.mean:.{digits}f}{error}" + (f" ({values.count} of {of})" if values.count < of else "")


def at_kls(compared: Compared, kls: Sequence[float]) -> list[Band | None]:
    """The score at each KL, over the seeds."""
    return [band([score_at(course, kl) for course in compared.courses]) for kl in kls]


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
    columns = ["", "rate", "drawn", "CPU s", *(f"at KL {kl:g}" for kl in task.kls)]
    columns += [
        "last score",
        "last KL",
        f"best up to KL {task.search_kl:g}",
        *(f"{what} there" for what in VARIETY.values()),
    ]
    lines = [_line(columns), "| --- " * len(columns) + "|"]
    for compared in ordered(entries, task.search_kl):
        results = list(compared.results.values())
        cells = [f"`{compared.label}`", f"{compared.search.chosen:g}"]
        cells += [f"{fmean(getattr(r, name) for r in results):.0f}" for name in ("responses", "cpu_seconds")]
        cells += [number(values, len(results)) for values in at_kls(compared, task.kls)]
        rows = [result.rows(compared.line) for result in results]
        cells += [number(band([row[-1]["score"] for row in rows]), len(rows))]
        cells += [number(band([row[-1]["kl"] for row in rows]), len(rows), 1)]
        cells += [number(best_under(compared, task.search_kl), len(results))]
        places = [best_place_under(course, task.search_kl) for course in compared.courses]
        for name in VARIETY:
            found = [
                None if place is None else read_at([point[name] for point in row], place)
                for row, place in zip(rows, places, strict=True)
            ]
            cells.append(number(band(found), len(rows), 3))
        lines.append(_line(cells))
    if entries:
        first = next(iter(entries[0].results.values())).evaluations[0]
        cells = ["the SFT model", "-", "-", "-", *("-" for _ in task.kls), f"{first['score']:.2f}", "0.0", "-"]
        lines.append(_line([*cells, *(f"{first[name]:.3f}" for name in VARIETY)]))
    return "\n".join(lines)


def search_table(entries: Sequence[Compared], rates: Sequence[float], kl: float) -> str:
    """What the search found: the best score under its KL at each rate, the chosen one in bold."""
    lines = [_line(["", *(f"rate {rate:g}" for rate in rates), "CPU s"]), "| --- " * (len(rates) + 2) + "|"]
    for compared in entries:
        cells = []
        for rate in rates:
            score = compared.search.scores.get(rate)
            cell = "-" if score is None else f"{score:.2f}"
            cells.append(f"**{cell}**" if rate == compared.search.chosen else cell)
        lines.append(_line([f"`{compared.label}`", *cells, f"{compared.search.cpu_seconds:.0f}"]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def broken_off(entries: Sequence[Compared]) -> list[str]:
    """A sentence for each run that did not come to its end."""
    return [
        f"`{compared.label}`, seed {seed}, broke off after {result.responses} responses: {result.why}"
        for compared in entries
        for seed, result in compared.results.items()
        if not result.ended
    ]
