"""What a comparison has found so far, as a file of JSON lines: a line for each entry of each task, with the budget of
the task, the search of the entry, and its runs.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.comparison.entries import LINE
from scripts.comparison.frontier import Point
from scripts.comparison.runs import Result, Run
from scripts.comparison.search import Search
from scripts.comparison.tasks import Task

FILE = "results.jsonl"
DIGITS = 6  # significant ones that are kept: evaluations are of 256 prompts


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
    """A file of results, which a later command adds to; a task at another budget starts anew."""

    def __init__(self, path: Path):
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        self.entries = {(entry["task"], entry["label"]): entry for entry in map(json.loads, lines)}

    def add(self, task: Task, label: str, search: Search, runs: Sequence[Run]) -> None:
        """Write an entry's search and runs down, beside its earlier runs at the same rate."""
        found = {str(run.seed): dataclasses.asdict(run.result) for run in runs}
        entry = {"task": task.name, "label": label, "budget": _budget(task), "search": dataclasses.asdict(search)}
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
                found.append(Compared(entry["label"], Search(scores, search["cpu_seconds"], search["chosen"]), results))
        return found

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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(f"{json.dumps(entry)}\n" for entry in self.entries.values()), encoding="utf-8")
        partial.replace(self.path)


def _budget(task: Task) -> dict[str, int]:
    return {"responses": task.responses, "steps": task.steps, "every": task.every}


def _rounded(content: Any) -> Any:
    """The same for JSON, each float to DIGITS digits."""
    if isinstance(content, float):
        return float(f"{content:.{DIGITS}g}")
    if isinstance(content, dict):
        return {str(name): _rounded(value) for name, value in content.items()}
    return [_rounded(value) for value in content] if isinstance(content, list) else content
