"""What a comparison has found so far, as one file of JSON: each task's budget, each entry's search and runs."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.comparison.entries import LINE
from scripts.comparison.frontier import Point
from scripts.comparison.runs import Result, Run, write_json
from scripts.comparison.search import Search
from scripts.comparison.tasks import Task

FILE = "results.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """An entry on a task: how it was tuned, and its results by seed."""

    label: str
    search: Search
    results: dict[int, Result]

    @property
    def line(self) -> bool:
        """Whether the entry is read on the line."""
        return self.label.endswith(LINE)

    @property
    def courses(self) -> list[list[Point]]:
        """Score against KL as the entry reads it, by seed."""
        return [result.course(self.line) for result in self.results.values()]


class Results:
    """The file of a comparison, which a later command adds to; a task at another budget starts anew."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        read = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        self.tasks: dict[str, dict[str, Any]] = read.get("tasks", {})

    def add(self, task: Task, label: str, search: Search, runs: Sequence[Run]) -> None:
        """Write an entry's search and runs down, beside its earlier runs at the same rate."""
        if self.tasks.get(task.name, {}).get("budget") != _budget(task):
            self.tasks[task.name] = {"budget": _budget(task), "entries": {}}
        entries = self.tasks[task.name]["entries"]
        earlier = entries.get(label, {})
        kept = earlier["runs"] if earlier and earlier["search"]["chosen"] == search.chosen else {}
        entries[label] = {
            "search": dataclasses.asdict(search),
            "runs": kept | {str(run.seed): dataclasses.asdict(run.result) for run in runs},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"tasks": self.tasks})

    def of(self, task: Task) -> list[Compared]:
        """The entries of a task at its budget."""
        written = self.tasks.get(task.name, {})
        if written.get("budget") != _budget(task):
            return []
        found = []
        for label, entry in written["entries"].items():
            search = entry["search"]
            scores = {float(rate): score for rate, score in search["scores"].items()}
            results = {int(seed): Result(**result) for seed, result in entry["runs"].items()}
            found.append(Compared(label, Search(scores, search["cpu_seconds"], search["chosen"]), results))
        return found


def _budget(task: Task) -> dict[str, int]:
    return {"responses": task.responses, "steps": task.steps, "every": task.every}
