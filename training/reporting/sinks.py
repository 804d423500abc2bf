"""Where a run's metrics go: a file of JSON lines, the terminal, TensorBoard, and from there Weights & Biases.

    check_wandb(project)                                         # before any work
    writer = MetricWriter(output_dir, total_steps=200, view=views.PPO)
    writer.hparams({"lr": 1e-5, "dialect": "default"})
    writer.log(step, samples, metrics.reduce())
    writer.samples(step, rows)                                   # see sample_tables.py
    writer.close()

Every rank may hold a MetricWriter; on all but the main one it does nothing. `resume_step` is the last step that counts
when a run goes on from a checkpoint: what an earlier process logged after it is dropped, so no step counts twice.
"""

import importlib.util
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from engine.distributed import is_main
from engine.errors import UserError
from training.reporting.metrics_file import METRICS_FILE, JsonlSink
from training.reporting.progress import ProgressBar
from training.reporting.sample_tables import MIN_WIDTH, samples_markdown, samples_table
from training.reporting.standard_errors import NOISE
from training.reporting.views import PPO, View
from training.reporting.wall_clock import WallClock, seconds_after
from training.runtime.unwritten import note


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
        self._file = self._bar = self._wandb = self._clock = None
        self._tensorboard: TensorBoardSink | None = None
        if not is_main():
            return
        output_dir = Path(output_dir)
        self._clock = WallClock(redone=seconds_after(output_dir / METRICS_FILE, resume_step))
        self._file = JsonlSink(output_dir / METRICS_FILE, resume_step=resume_step)
        name = run_name(output_dir)
        if wandb_project is not None:
            import wandb

            # Before the SummaryWriter is made, which W&B then listens to; its own files go to the output folder.
            self._wandb = wandb.init(project=wandb_project, name=name, dir=str(output_dir), sync_tensorboard=True)
        self._tensorboard_dir = Path(tensorboard_dir or output_dir / "tensorboard")
        if tensorboard:
            try:
                self._tensorboard = TensorBoardSink(
                    self._tensorboard_dir, view=view, name=name, resume_step=resume_step
                )
            except Exception as error:
                note(self._tensorboard_dir, error)
        self.count(total_steps, shown=view.bar, first_step=max(0, resume_step or 0))

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`, after which `samples` responses (or examples) had been seen; once a step,
        reduced before. What passed since the line before is added to them."""
        metrics = {**metrics, **self.take_time()}
        if self._file and self._bar:
            self._file.log(step, samples, metrics)
            self._bar.log(step, samples, metrics)
        self._to_tensorboard(lambda sink: sink.log(step, samples, metrics))

    def count(self, total_steps: int, *, shown: Mapping[str, str], **how) -> None:
        """Have the progress be of these steps from here on; arguments as of `ProgressBar`."""
        if self._file is None:
            return
        if self._bar is not None:
            self._bar.close()
        self._bar = ProgressBar(total_steps, shown=shown, **how)

    def take_time(self) -> dict[str, float]:
        """What passed since the last line, as metrics; the next line does not count it again. {} on other ranks."""
        return self._clock.take() if self._clock else {}

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Show sampled responses: rows with `prompt`, `response`, `score`, `kl`."""
        if self._bar:
            width = max(MIN_WIDTH, min(160, shutil.get_terminal_size().columns))
            self._bar.write(f"samples, step {step}\n{samples_table(rows, width)}\n")
        self._to_tensorboard(lambda sink: sink.text(step, "samples", samples_markdown(rows)))

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Write the distribution of `values` (this rank's: gather them first where that matters) to TensorBoard."""
        self._to_tensorboard(lambda sink: sink.histogram(step, tag, values))

    def hparams(self, settings: Mapping) -> None:
        """Write the run's settings to TensorBoard and W&B; nested ones are named outer/inner."""
        if self._wandb:
            self._wandb.config.update(dict(settings), allow_val_change=True)
        self._to_tensorboard(lambda sink: sink.hparams(settings))

    def write(self, text: str) -> None:
        """Print `text` on the main rank without breaking the progress bar."""
        if self._bar:
            self._bar.write(text)

    def close(self) -> None:
        """Write out what is buffered, end the bar and the W&B run."""
        if self._file and self._bar:
            self._file.close()
            self._bar.close()
        self._to_tensorboard(lambda sink: sink.close())
        if self._wandb:
            self._wandb.finish()

    def _to_tensorboard(self, write: Callable[["TensorBoardSink"], None]) -> None:
        """Its first error is noted, and it gets nothing from then on: a run does not end for its curves."""
        if self._tensorboard is not None:
            try:
                write(self._tensorboard)
            except Exception as error:  # of the library's thread, too, whichever kind that raises
                self._tensorboard = None
                note(self._tensorboard_dir, error)


def run_name(output_dir: Path) -> str:
    """The run's name where several are compared: its folder's and that of the folder above."""
    folder = output_dir.resolve()
    return f"{folder.name} ({folder.parent.name})"


def check_wandb(project: str | None, *, tensorboard: bool = True) -> None:
    """Raise UserError where a project is given and W&B cannot be used: not installed, or TensorBoard switched off."""
    if project is None:
        return
    if not project.strip():
        raise UserError(f"--wandb_project {project!r}: give the project a name.")
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # without an origin it is no package, but the folder that W&B writes into
        raise UserError(
            f"--wandb_project {project}: the package wandb is not installed. pip install wandb, or leave the flag out."
        )
    if not tensorboard:
        raise UserError(
            f"--wandb_project {project}: W&B takes over what is written for TensorBoard, which is switched "
            "off. Switch it on, or leave the flag out."
        )


class TensorBoardSink:
    """One run's folder of events: scalars, texts, histograms, settings and the grouping of curves.

    Events cannot be taken back: a new file tells TensorBoard to hide those after `resume_step`, or all earlier ones
    where a run starts anew. `name` is the run's in the HPARAMS table, where runs of one name become one row.
    """

    def __init__(self, log_dir: str | Path, *, name: str, view: View, resume_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter  # takes seconds: only where it is used, on the main rank

        threading.excepthook = _told_elsewhere
        _wait_for_a_later_name(Path(log_dir))
        self._name, self._view = name, view
        self._writer = SummaryWriter(str(log_dir), purge_step=0 if resume_step is None else resume_step + 1)
        self._with_bounds = {name for charts in view.held_out.values() for name in charts.values()}
        self._writer.add_custom_scalars(_layout(view))

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, and the bounds that held-out charts draw; the file is flushed at least every two
        minutes."""
        for name, value in {"samples": samples, **metrics}.items():
            self._writer.add_scalar(name, value, step)
            if name in self._with_bounds:
                margin = NOISE * metrics.get(f"{name}_se", 0.0)
                for bound, end in zip(_bounds(name), (value - margin, value + margin)):
                    self._writer.add_scalar(bound, end, step)

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Write a text, which the TEXT tab shows above those of earlier steps."""
        self._writer.add_text(tag, markdown, step)

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """A tensor without values or with none that is finite has no histogram, and writes none."""
        values = values.detach().float().flatten()
        values = values[values.isfinite()]
        if values.numel():
            self._writer.add_histogram(tag, values, step)

    def hparams(self, settings: Mapping) -> None:
        """The settings, twice: a row of the HPARAMS table with the metrics to compare runs by, and as a text.

        `SummaryWriter.add_hparams` would put the row into a folder of its own, and so split the run in two.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata, summary_v2  # by hparams.api it needs TensorFlow
        from tensorboard.plugins.hparams.api_pb2 import Experiment, HParamInfo, MetricInfo, MetricName
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        row = flattened(settings)
        table = Experiment(
            # `differs` only makes columns visible from the start; hparams_config_pb has no word for it.
            hparam_infos=[HParamInfo(name=name, differs=name in self._view.tuned) for name in row],
            metric_infos=[MetricInfo(name=MetricName(tag=name)) for name in self._view.compared],
        )
        data = metadata.create_summary_metadata(HParamsPluginData(experiment=table))
        columns = Summary.Value(tag=metadata.EXPERIMENT_TAG, metadata=data, tensor=metadata.NULL_TENSOR)
        self._writer.file_writer.add_summary(Summary(value=[columns]))
        self._writer.file_writer.add_summary(summary_v2.hparams_pb(row, trial_id=self._name))
        text = json.dumps(dict(settings), indent=2, default=str)
        self._writer.add_text("settings", "\n".join("    " + line for line in text.splitlines()), 0)

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()


MOST_BEHIND = 10.0
"""Seconds that are waited for, at most, where another machine's clock was ahead of this one's."""


def _wait_for_a_later_name(log_dir: Path) -> None:
    """Wait until the clock is past the second in which the folder's newest file was begun, where it is not.

    TensorBoard reads a folder's files in the order of their names, `events.out.tfevents.SECOND.HOST.PROCESS.NUMBER`,
    whatever they say of each other; of two of one second the later one may come first, as "10" is before "9".
    """
    seconds = [re.match(r"events\.out\.tfevents\.(\d+)", path.name) for path in log_dir.glob("events.out.tfevents.*")]
    behind = max((int(found[1]) + 1 - time.time() for found in seconds if found), default=0.0)
    time.sleep(min(max(behind, 0.0), MOST_BEHIND))


def _bounds(name: str) -> tuple[str, str]:
    """The names of a held-out metric's lower and upper bound."""
    below = name.removeprefix("eval/")
    return f"two_standard_errors/{below}_low", f"two_standard_errors/{below}_high"


def _layout(view: View) -> dict:
    """The Custom Scalars tab, for SummaryWriter.add_custom_scalars.

    Held-out metrics, a few points, have charts with margins: the tab's smoothing (0.6 at first) leaves those as they
    are, and would draw a line far from three points. Charts with margins are shown from a section's last to its first.
    In the others names are regular expressions, and beginnings match.
    """
    held_out = {
        section: {title: ["Margin", [name, *_bounds(name)]] for title, name in reversed(charts.items())}
        for section, charts in view.held_out.items()
    }
    training = {
        section: {title: ["Multiline", [f"{name}$" for name in names]] for title, names in charts.items()}
        for section, charts in view.charts.items()
    }
    return held_out | training


def _told_elsewhere(failure: threading.ExceptHookArgs) -> None:
    """Print the stack trace of a thread that failed, but for TensorBoard's, whose error the next call raises."""
    if type(failure.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
        threading.__excepthook__(failure)


def flattened(settings: Mapping, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Settings as one row of a table: nested ones as outer/inner, lists as text, those that are None left out."""
    flat = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}/")
        elif value is not None:
            flat[prefix + name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat
