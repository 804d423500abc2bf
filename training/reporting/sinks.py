"""Where a run's metrics go: a file of JSON lines, TensorBoard (and from there W&B), the terminal.

    writer = MetricWriter(output_dir, total_steps=200, view=views.PPO)
    writer.hparams({"lr": 1e-5, "dialect": "default"})
    writer.log(step, samples, metrics.reduce())
    writer.samples(step, rows)                                   # see sample_tables.py
    writer.close()

Every rank may hold a MetricWriter; on all but the main one it does nothing. `resume_step` is the last step that counts
when a run goes on from a checkpoint: what an earlier process logged after it is dropped, so no step counts twice.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from engine.distributed import is_main
from training.program.unwritten import note
from training.reporting.metrics_file import METRICS_FILE, JsonlSink
from training.reporting.progress import ProgressBar
from training.reporting.sample_tables import MIN_WIDTH, samples_markdown, samples_table
from training.reporting.tensorboard_sink import TensorBoardSink
from training.reporting.views import PPO, View
from training.reporting.wall_clock import WallClock, seconds_after
from training.reporting.wandb_sync import start_wandb


class MetricWriter:
    """All sinks of a run on the main rank, none on the others.

    output_dir: where metrics.jsonl goes, and tensorboard/ unless `tensorboard_dir` names another folder.
    wandb_project: the W&B project that gets TensorBoard's curves too (call check_wandb before).
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        total_steps: int,
        resume_step: int | None = None,
        view: View = PPO,
        tensorboard: bool = True,
        tensorboard_dir: str | Path | None = None,
        wandb_project: str | None = None,
    ):
        self._bar = self._tensorboard = self._wandb = self._clock = None
        self._sinks = []
        if not is_main():
            return
        output_dir = Path(output_dir)
        self._clock = WallClock(redone=seconds_after(output_dir / METRICS_FILE, resume_step))
        self._sinks.append(JsonlSink(output_dir / METRICS_FILE, resume_step=resume_step))
        if wandb_project is not None:
            self._wandb = start_wandb(wandb_project, run_name(output_dir), output_dir)
        if tensorboard:
            folder = tensorboard_dir or output_dir / "tensorboard"
            self._tensorboard = Forgiving(
                folder,
                lambda: TensorBoardSink(folder, view=view, name=run_name(output_dir), resume_step=resume_step),
            )
            self._sinks.append(self._tensorboard)
        self.count(total_steps, shown=view.bar, first_step=max(0, resume_step or 0))

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`, after which `samples` responses (or examples) had been seen; once a step,
        reduced before. What passed since the line before is added to them."""
        metrics = {**metrics, **self.take_time()}
        for sink in self._sinks:
            sink.log(step, samples, metrics)

    def count(self, total_steps: int, *, shown: Mapping[str, str], **how) -> None:
        """Have the progress be of these steps from here on; arguments as of `ProgressBar`."""
        if self._clock is None:
            return
        if self._bar is not None:
            self._bar.close()
            self._sinks.remove(self._bar)
        self._bar = ProgressBar(total_steps, shown=shown, **how)
        self._sinks.append(self._bar)

    def take_time(self) -> dict[str, float]:
        """What passed since the last line, as metrics; the next line does not count it again. {} on other ranks."""
        return self._clock.take() if self._clock else {}

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Show sampled responses: rows with `prompt`, `response`, `score`, `kl`."""
        if self._bar:
            width = max(MIN_WIDTH, min(160, shutil.get_terminal_size().columns))
            self._bar.write(f"samples, step {step}\n{samples_table(rows, width)}\n")
        if self._tensorboard:
            self._tensorboard.text(step, "samples", samples_markdown(rows))

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Write the distribution of `values` (this rank's: gather them first where that matters) to TensorBoard."""
        if self._tensorboard:
            self._tensorboard.histogram(step, tag, values)

    def hparams(self, settings: Mapping) -> None:
        """Write the run's settings to TensorBoard and W&B; nested ones are named outer/inner."""
        if self._wandb:
            self._wandb.config.update(dict(settings), allow_val_change=True)
        if self._tensorboard:
            self._tensorboard.hparams(settings)

    def write(self, text: str) -> None:
        """Print `text` on the main rank without breaking the progress bar."""
        if self._bar:
            self._bar.write(text)

    def close(self) -> None:
        """Write out what is buffered, end the bar and the W&B run."""
        for sink in self._sinks:
            sink.close()
        if self._wandb:
            self._wandb.finish()


class Forgiving:
    """A sink that may fail: its first error is told, and it gets nothing from then on.

    folder: where it writes. make: makes it.
    """

    def __init__(self, folder: str | Path, make: Callable[[], TensorBoardSink]):
        self._folder, self._sink = folder, None
        with self._noting():
            self._sink = make()

    def log(self, *args) -> None:
        self._call("log", *args)

    def text(self, *args) -> None:
        self._call("text", *args)

    def histogram(self, *args) -> None:
        self._call("histogram", *args)

    def hparams(self, *args) -> None:
        self._call("hparams", *args)

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str, *args) -> None:
        if self._sink is not None:
            with self._noting():
                getattr(self._sink, name)(*args)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the library's thread, too, whichever kind that raises
            self._sink = None
            note(self._folder, error)


def run_name(output_dir: Path) -> str:
    """The run's name where several are compared: its folder's and that of the folder above."""
    folder = output_dir.resolve()
    return f"{folder.name} ({folder.parent.name})"
