"""Where a run's metrics go: a file of JSON lines, TensorBoard, the terminal.

    writer = MetricWriter(output_dir, total_steps=200, resume_step=None)
    writer.hparams({"lr": 1e-5, "dialect": "default"})
    writer.log(step, samples, metrics.reduce())
    writer.samples(step, rows)                                   # see sample_tables.py
    writer.close()

Every rank may hold a MetricWriter; on all but the main one it does nothing. `resume_step` is the last step that counts
when a run goes on from a checkpoint: what an earlier process logged beyond it is dropped, so no step counts twice.
"""
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from tqdm import tqdm

from engine.distributed import is_main
from engine.errors import UserError
from training.sample_tables import MIN_WIDTH, samples_markdown, samples_table

METRICS_FILE = "metrics.jsonl"
SHOWN = {"score": "objective/scores", "kl": "objective/kl", "length": "rollout/response_length"}
"""What stands behind the progress bar: label and metric."""


class MetricWriter:
    """All sinks of a run on the main rank, none on the others. Files go to `output_dir`."""

    def __init__(self, output_dir: str | Path, *, total_steps: int, resume_step: int | None = None,
                 tensorboard: bool = True, shown: Mapping[str, str] = SHOWN):
        self._bar = self._tensorboard = None
        self._sinks = []
        if not is_main():
            return
        output_dir = Path(output_dir)
        self._sinks.append(JsonlSink(output_dir / METRICS_FILE, resume_step=resume_step))
        if tensorboard:
            self._tensorboard = TensorBoardSink(output_dir / "tensorboard", resume_step=resume_step)
            self._sinks.append(self._tensorboard)
        self._bar = ProgressBar(total_steps, first_step=resume_step or 0, shown=shown)
        self._sinks.append(self._bar)

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`, after which `samples` samples had been seen; once a step, reduced before."""
        for sink in self._sinks:
            sink.log(step, samples, metrics)

    def samples(self, step: int, rows: Sequence[Mapping], *, tag: str = "samples") -> None:
        """Show sampled responses: rows with `prompt`, `response`, `score`, `kl`."""
        if self._bar:
            width = max(MIN_WIDTH, min(160, shutil.get_terminal_size().columns))
            self._bar.write(f"{tag}, step {step}\n{samples_table(rows, width)}\n")
        if self._tensorboard:
            self._tensorboard.text(step, tag, samples_markdown(rows))

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Write the distribution of `values` (this rank's: gather them first where that matters) to TensorBoard."""
        if self._tensorboard:
            self._tensorboard.histogram(step, tag, values)

    def hparams(self, hparams: Mapping) -> None:
        """Write the run's settings to TensorBoard."""
        if self._tensorboard:
            self._tensorboard.hparams(hparams)

    def write(self, text: str) -> None:
        """Print `text` on the main rank without breaking the progress bar."""
        if self._bar:
            self._bar.write(text)

    def close(self) -> None:
        """Write out what is buffered and end the bar."""
        for sink in self._sinks:
            sink.close()


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
    os.replace(temporary, path)


class TensorBoardSink:
    """Scalars, texts and histograms as TensorBoard events.

    Events cannot be taken back; on resume the new file tells TensorBoard to hide those after `resume_step`.
    """

    def __init__(self, log_dir: str | Path, *, resume_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter  # takes seconds: only where it is used, on the main rank

        self._writer = SummaryWriter(str(log_dir), purge_step=None if resume_step is None else resume_step + 1)

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        for name, value in {"samples": samples, **metrics}.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, tag: str, markdown: str) -> None:
        self._writer.add_text(tag, markdown, step)

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """A tensor without values or with none that is finite has no histogram, and writes none."""
        values = values.detach().float().flatten()
        values = values[values.isfinite()]
        if values.numel():
            self._writer.add_histogram(tag, values, step)

    def hparams(self, hparams: Mapping) -> None:
        """The settings as a text, which TensorBoard shows for every run; its hparams tab would split the run in two."""
        text = json.dumps(dict(hparams), indent=2, default=str)
        self._writer.add_text("hparams", "\n".join("    " + line for line in text.splitlines()), 0)

    def close(self) -> None:
        self._writer.close()


class ProgressBar:
    """The run's progress on stderr: a bar in a terminal; elsewhere (a log file) a plain line every `interval` seconds.

    Both show the rate and the time left, from the steps of this process only: those before a resume took none of its
    time.
    """

    def __init__(self, total_steps: int, *, first_step: int = 0, shown: Mapping[str, str] = SHOWN, stream=None,
                 interval: float = 15.0, clock=time.monotonic):
        self._stream = sys.stderr if stream is None else stream
        self._total, self._first, self._shown = total_steps, first_step, shown
        self._interval, self._clock = interval, clock
        self._started = clock()
        self._due = self._started
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=total_steps, initial=first_step, unit="step", file=self._stream, dynamic_ncols=True)

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        shown = {label: f"{metrics[name]:.3f}" for label, name in self._shown.items() if name in metrics}
        if self._bar is None:
            self._log_line(step, shown)
            return
        if shown:
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)
        self._bar.refresh()

    def _log_line(self, step: int, shown: Mapping[str, str]) -> None:
        now = self._clock()
        if now < self._due and step < self._total:
            return
        self._due = now + self._interval
        line = f"step {step}/{self._total} ({step / max(self._total, 1):.0%})"
        if step > self._first:
            seconds = (now - self._started) / (step - self._first)
            left = timedelta(seconds=round(seconds * (self._total - step)))
            line += f", {seconds:.2f} s/step, {left} left"
        self.write(", ".join([line, *(f"{label} {value}" for label, value in shown.items())]))

    def write(self, text: str) -> None:
        """Print `text` above the bar."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
