"""A task's results as tables in Markdown."""

from collections.abc import Sequence
from statistics import fmean

from scripts.comparison.frontier import Band, band, score_at
from scripts.comparison.results import Compared
from scripts.comparison.tasks import Task


def number(values: Band | None, of: int, digits: int = 2) -> str:
    """Mean and standard error, and how many of the runs came so far where not all did."""
    if values is None:
        return "-"
    error = "" if values.error is None else f" ± {values.error:.{digits}f}"
    return f"{values.mean:.{digits}f}{error}" + (f" ({values.count} of {of})" if values.count < of else "")


def at_kls(compared: Compared, kls: Sequence[float]) -> list[Band | None]:
    """The score at each KL, over the seeds."""
    courses = [result.course for result in compared.results.values()]
    return [band([score_at(course, kl) for course in courses]) for kl in kls]


def ordered(entries: Sequence[Compared], kl: float) -> list[Compared]:
    """The best at this KL first, those that never came to it last."""

    def key(compared: Compared) -> tuple[bool, float]:
        found = at_kls(compared, [kl])[0]
        return found is None, -(found.mean if found else 0.0)

    return sorted(entries, key=key)


def main_table(task: Task, entries: Sequence[Compared]) -> str:
    """A line an entry, and one of the SFT model."""
    columns = ["", "rate", "drawn", "CPU s", *(f"at KL {kl:g}" for kl in task.kls)]
    columns += ["last score", "last KL", "tokens", "bigrams a token", "known words"]
    lines = [_line(columns), "| --- " * len(columns) + "|"]
    for compared in ordered(entries, task.search_kl):
        results = list(compared.results.values())
        cells = [f"`{compared.label}`", f"{compared.search.chosen:g}"]
        cells += [f"{fmean(getattr(r, name) for r in results):.0f}" for name in ("responses", "cpu_seconds")]
        cells += [number(values, len(results)) for values in at_kls(compared, task.kls)]
        cells += _last_cells([result.evaluations[-1] for result in results])
        lines.append(_line(cells))
    if entries:
        first = next(iter(entries[0].results.values())).evaluations[0]
        lines.append(_line(["the SFT model", "-", "-", "-", *("-" for _ in task.kls), *_last_cells([first])]))
    return "\n".join(lines)


def _last_cells(rows: Sequence[dict[str, float]]) -> list[str]:
    digits = {"score": 2, "kl": 1, "tokens": 1, "distinct_bigrams": 3, "known_words": 3}
    return [number(band([row[name] for row in rows]), len(rows), places) for name, places in digits.items()]


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
