"""metrics.jsonl: one JSON object a line, with `step`, `samples` and the metrics of a step; written and read here."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from engine.errors import UserError

METRICS_FILE = "metrics.jsonl"


class JsonlSink:
    """One JSON object a line: `step`, `samples`, then the metrics. Each line is flushed: a killed run keeps its curves.

    NaN and infinities are written as null, since JSON has no word for them and most readers refuse Python's.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            truncate_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        numbers = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._file.write(json.dumps({"step": step, "samples": samples, **numbers}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: str | Path) -> list[tuple[str, dict]]:
    """The lines of a metrics file, each with the object it holds.

    A last line without its newline was being written when the run was killed, or is being written now: left out.

    Raises:
        UserError: a line is no JSON object with a step.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: no JSON ({error}); remove the line") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}, line {number}: expected an object with a whole number as step; remove the line")
        found.append((line, record))
    return found


def read_metrics(path: str | Path) -> list[dict]:
    """The records of a metrics.jsonl in the order written; null, which stands for a non-finite number, as NaN.

    Raises:
        UserError: no such file, or a line of it is no record of metrics.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; give the metrics.jsonl of a run")
    return [
        {name: math.nan if value is None else value for name, value in record.items()} for _, record in read_lines(path)
    ]


def truncate_after(path: str | Path, step: int) -> None:
    """Drop the lines of a metrics file whose step is greater than `step`; nothing to do where there is no file.

    The kept lines are written to a second file that then takes the first one's place, so that a kill in between leaves
    either the old file or the new one.
    """
    path = Path(path)
    if not path.exists():
        return
    kept = [line for line, record in read_lines(path) if record["step"] <= step]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
