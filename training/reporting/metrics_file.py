"""metrics.jsonl: one JSON object a line, with `step`, `samples` and the metrics of a step; written and read here."""

import json
import math
import os
import sys
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from engine.errors import UserError, shortened
from engine.files import parsed_json
from engine.whole_files import write_whole
from training.runtime.unwritten import note, written_after_all

METRICS_FILE = "metrics.jsonl"


class JsonlSink:
    """One JSON object a line: `step`, `samples`, then the metrics. Each line is written at once: a killed run keeps its
    curves.

    NaN and infinities are written as null, since JSON has no word for them and most readers refuse Python's. A line
    that cannot be written (a full disk) is kept and written with the next one that can. Where the folder is moved or
    deleted while the run goes, the file is made again at its place, with all that it held.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None):
        self._path, self._file, self._unwritten = Path(path), None, b""
        if resume_step is not None:
            truncate_after(path, resume_step)
        self._write()

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        numbers = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        line = json.dumps({"step": step, "samples": samples, **numbers}, allow_nan=False) + "\n"
        self._unwritten += line.encode()
        self._write()

    def close(self) -> None:
        """Write what could not be written before, if that can be done now."""
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        try:
            file = self._at_its_place()
            before = file.seek(0, os.SEEK_END)
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
            except OSError:
                written = file.seek(0, os.SEEK_END) - before
                file.seek(before)
                self._unwritten = file.read(written) + self._unwritten
                file.truncate(before)  # no half a line may stand there
                raise
        except OSError as error:
            note(self._path, error)
        else:
            written_after_all(self._path)

    def _at_its_place(self) -> FileIO:
        """The open file, which stands under the path."""
        before = self._file
        if before is not None:
            if self._path.exists() and self._path.stat().st_ino == os.fstat(before.fileno()).st_ino:
                return before
            self._file = None
            print(
                f"WARNING: {self._path.parent} was moved or deleted. The run goes on in a new folder of this name.",
                file=sys.stderr,
                flush=True,
            )
            before.seek(0)
            self._unwritten = before.read() + self._unwritten
            before.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab+", buffering=0)
        return self._file


def read_lines(path: str | Path) -> list[tuple[str, dict]]:
    """The lines of a metrics file, each with the object it holds.

    A last line without its newline was being written when the run was killed, or is being written now: left out.

    Raises:
        UserError: a line is no JSON object with a step, or holds something else than numbers.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no text ({error}); move it away, or remove the lines that are broken") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            record = parsed_json(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: no JSON ({error}); remove the line") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}, line {number}: expected an object with a whole number as step; remove the line")
        other = next((name for name, value in record.items() if not isinstance(value, int | float | None)), None)
        if other is not None:
            raise UserError(f"{path}, line {number}: {other} is {shortened(record[other])}, no number; remove the line")
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

    A kill in between leaves either the old file or the new one.
    """
    path = Path(path)
    if path.exists():
        write_whole(path, "".join(line for line, record in read_lines(path) if record["step"] <= step))
