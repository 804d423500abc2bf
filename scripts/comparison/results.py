"""Which rate is chosen for an entry, and what a comparison has found so far.

Every entry is tuned alike: runs of one seed at each of the task's rates, chosen by score under a KL. They are as long
as those that are compared, for shorter ones would choose rates that come to a KL sooner. Their seed is none that is
compared, so that an entry's choice is not made by luck that then counts as its own.

Results are a file of JSON lines: a line for each entry of each task, with the budget of the task, the search of the
entry, and its runs.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.atomic_files import write_whole
from engine.errors import UserError
from scripts.comparison.entries import LINE, Entry
from scripts.comparison.frontier import Point, best_score_under
from scripts.comparison.runs import Result, Run
from scripts.comparison.tasks import Task

SEED = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """scores: by rate, the best of the task's measure under its search_kl; None where a run broke off before any
    evaluation."""

    scores: dict[float, float | None]
    cpu_seconds: float
    chosen: float


def choose(scores: Mapping[float, float | None]) -> float | None:
    """The rate of the best score, the lowest of equally good ones; None where no rate has a score."""
    found = [(-score, rate) for rate, score in scores.items() if score is not None]
    return min(found)[1] if found else None


def searched(entry: Entry, runs: list[Run]) -> Search:
    """The choice, once the search's runs are complete; raises UserError where all of them broke off at once."""
    scores = {}
    for run in runs:
        course = run.result.course(entry.line, run.task.measure)
        scores[run.rate] = best_score_under(course, run.task.search_kl) if course[1:] else None
    chosen = choose(scores)
    if chosen is None:
        raise UserError(
            f"{entry.label}: each rate of {', '.join(f'{rate:g}' for rate in scores)} broke off before its first "
            f"evaluation ({runs[0].result.why}). Give lower --rates."
        )
    return Search(scores, sum(run.result.cpu_seconds for run in runs), chosen)


FILE = "results.jsonl"
DIGITS = 6  # significant ones that are kept: evaluations are of 256 prompts


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """An entry on a task: how it was tuned, its results by seed, and what of them is compared."""

    label: str
    search: Search
    results: dict[int, Result]
    measure: str = "score"

    @property
    def line(self) -> bool:
        """Whether the entry is read on the line."""
        return self.label.endswith(LINE)

    @property
    def courses(self) -> list[list[Point]]:
        """What is compared against KL as the entry reads it, by seed."""
        return self.courses_of(self.measure)

    def courses_of(self, measure: str) -> list[list[Point]]:
        """Another measure against KL."""
        return [result.course(self.line, measure) for result in self.results.values()]


class Results:
    """A file of results, which a later command adds to; a task at another budget starts anew."""

    def __init__(self, path: Path):
        self.path = path
        self.entries = self._read()

    def add(self, task: Task, label: str, search: Search, runs: Sequence[Run]) -> None:
        """Write an entry's search and runs down, beside its earlier runs at the same rate."""
        found = {str(run.seed): dataclasses.asdict(run.result) for run in runs}
        entry = {"task": task.name, "label": label, "budget": _budget(task), "search": dataclasses.asdict(search)}
        self.entries = self._read()  # another command may have written beside this one
        self._put(_rounded(entry | {"runs": found}))
        self._write()

    def take(self, other: "Results") -> None:
        """Write down what another file has, too."""
        for entry in other.entries.values():
            self._put(entry)
        self._write()

    def of(self, task: Task) -> list[Compared]:
        """The entries of a task at its budget."""
        found = []
        for entry in self.entries.values():
            if (entry["task"], entry["budget"]) == (task.name, _budget(task)):
                search = entry["search"]
                scores = {float(rate): score for rate, score in search["scores"].items()}
                results = {int(seed): Result(**result) for seed, result in entry["runs"].items()}
                chosen = Search(scores, search["cpu_seconds"], search["chosen"])
                found.append(Compared(entry["label"], chosen, results, task.measure))
        return found

    def _read(self) -> dict[tuple[str, str], dict[str, Any]]:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        return {(entry["task"], entry["label"]): entry for entry in map(json.loads, lines)}

    def _put(self, entry: dict[str, Any]) -> None:
        task, label = entry["task"], entry["label"]
        self.entries = {
            key: other
            for key, other in self.entries.items()
            if other["task"] != task or other["budget"] == entry["budget"]
        }
        earlier = self.entries.get((task, label))
        kept = earlier["runs"] if earlier and earlier["search"]["chosen"] == entry["search"]["chosen"] else {}
        self.entries[task, label] = entry | {"runs": kept | entry["runs"]}

    def _write(self) -> None:
        write_whole(self.path, "".join(f"{json.dumps(entry)}\n" for entry in self.entries.values()))


def _budget(task: Task) -> dict[str, int]:
    return {"responses": task.responses, "steps": task.steps, "every": task.every}


def _rounded(content: Any) -> Any:
    """The same for JSON, each float to DIGITS digits."""
    if isinstance(content, float):
        return float(f"{content:.{DIGITS}g}")
    if isinstance(content, dict):
        return {str(name): _rounded(value) for name, value in content.items()}
    return [_rounded(value) for value in content] if isinstance(content, list) else content
