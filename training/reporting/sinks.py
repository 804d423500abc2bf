"""Writes a run's metrics to metrics.jsonl, the terminal, TensorBoard, and other trackers (trackers.py).

    writer = MetricWriter(output_dir, total_steps=200, view=PPO_VIEW)
    writer.hparams({"lr": 1e-5, "dialect": "default"})
    writer.log(step, samples, metrics.reduce())
    writer.samples(step, rows)                                   # see sample_tables.py
    writer.close()

Every rank may have a MetricWriter; it writes on the main rank only. `resume_step` is the step of the checkpoint that a
run resumes from. The lines that an earlier process wrote about later steps are removed, so that no step counts twice.

A View lists the metrics that a program shows, in their order. docs/metrics.md explains the names of metrics. If a run
lacks some metrics of a chart (those of the critic, for example), the chart shows the others. One TensorBoard may show
runs of steps 1, 2 and 3 together: sections of the same title are merged, and so are equal charts. A metric is drawn for
every run that has it.
"""

import contextlib
import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from tqdm import tqdm

from engine.atomic_files import write_whole
from engine.distributed import is_main
from engine.errors import without_query
from engine.models.model_paths import one_line
from training.reporting.run_record import METRICS_FILE, read_lines, read_metrics
from training.reporting.sample_tables import samples_markdown, samples_text
from training.reporting.standard_errors import NOISE
from training.reporting.trackers import TrackerSink
from training.runtime.environment import print_line
from training.runtime.processes import place
from training.runtime.stopping import note_unwritten, note_written

TENSORBOARD = "tensorboard"


@dataclass(frozen=True, kw_only=True)
class View:
    """The metrics shown in the progress bar, and in TensorBoard's Custom Scalars tab.

    bar: {label in the progress bar: metric}. charts: {section: {chart: its metrics}}; a row of the tab has three
        charts.
    held_out: {section: {chart: its metric}}; such a chart is drawn unsmoothed, with the metric's margin of error.
    """

    bar: Mapping[str, str]
    charts: Mapping[str, Mapping[str, tuple[str, ...]]]
    held_out: Mapping[str, Mapping[str, str]]


_TIME_AND_MEMORY = {
    "seconds a step": ("time/step", "time/generate", "time/make_experience", "time/train", "time/checkpoint"),
    "peak memory, 10^9 bytes": ("memory/peak_gb",),
}

PPO_VIEW = View(
    bar={"score": "objective/scores", "kl": "objective/kl", "length": "rollout/response_length"},
    charts={
        "score and KL": {
            "score": ("objective/scores",),
            "KL to the reference, nats a response": ("objective/kl",),
            "reward: score with the KL penalty, the penalty alone": (
                "objective/rlhf_reward",
                "objective/non_score_reward",
            ),
            "KL coefficient": ("objective/kl_coef",),
            "KL, nats a token": ("objective/kl_per_token",),
            "entropy, nats a token": ("objective/entropy",),
        },
        "responses": {
            "length, tokens": ("rollout/response_length",),
            "share that ended by itself": ("rollout/eos_rate",),
        },
        "policy": {
            "clip fraction": ("policy/clipfrac",),
            "approximate KL of the updates": ("policy/approxkl",),
            "loss": ("policy/loss",),
        },
        "value": {
            "explained variance: of the returns, of what really followed": (
                "value/explained_variance",
                "value/explained_outcome",
            ),
            "loss": ("value/loss",),
            "values and returns": ("value/mean", "returns/mean"),
            "calibration: what followed, by value (1 is right)": ("value/slope",),
            "bias: value less what followed": ("value/bias",),
        },
        "critic's pretraining, steps up to 0": {
            "explained variance, pretraining": ("critic_pretrain/explained_variance",),
            "loss, pretraining": ("critic_pretrain/loss",),
            "calibration, pretraining (1 is right)": ("critic_pretrain/slope",),
        },
        "optimizers": {
            "learning rates": ("policy/lr", "value/lr"),
            "gradient norms": ("policy/grad_norm", "value/grad_norm"),
            "advantages before whitening, standard deviation": ("advantages/std",),
        },
        "time and memory": _TIME_AND_MEMORY | {"tokens generated per second": ("rollout/tokens_per_second",)},
    },
    held_out={
        "held-out prompts": {
            "score, held out": "eval/score",
            "KL to the reference, held out": "eval/kl",
            "score, change since before training": "eval/score_change",
            "length, held out": "eval/response_length",
            "distinct bigrams, held out": "eval/distinct_bigrams",
            "compressed together, bytes a token": "eval/compressed_bytes",
            "new words, share": "eval/new_words",
        },
    },
)


def averaged_view(view: View) -> View:
    """The view with additional held-out charts for the averaged weights."""
    sections = {
        f"{section}, EMA": {f"{title}, EMA": name.replace("eval/", "eval/ema_") for title, name in charts.items()}
        for section, charts in view.held_out.items()
    }
    return dataclasses.replace(view, held_out={**view.held_out, **sections})


_SUPERVISED = {
    "optimizer": {"learning rate": ("train/lr",), "gradient norm": ("train/grad_norm",)},
    "time and memory": _TIME_AND_MEMORY,
}

SFT_VIEW = View(
    bar={"loss": "train/loss", "lr": "train/lr"},
    charts={
        "texts": {"loss, nats a token": ("train/loss",)},
        **_SUPERVISED,
    },
    held_out={
        "held-out texts": {"loss, nats a token, held out": "eval/loss", "perplexity, held out": "eval/perplexity"}
    },
)

REWARD_VIEW = View(
    bar={"loss": "train/pair_loss", "step loss": "train/step_loss", "accuracy": "train/accuracy", "lr": "train/lr"},
    charts={
        "pairs": {
            "accuracy": ("train/accuracy",),
            "loss, nats a pair": ("train/pair_loss",),
            "margin": ("train/margin",),
            "margin, standard deviation": ("train/margin_std",),
        },
        "steps": {"loss, nats a step": ("train/step_loss",)},
        **_SUPERVISED,
    },
    held_out={
        "held-out pairs": {
            "accuracy, held out": "eval/accuracy",
            "loss, nats a pair, held out": "eval/pair_loss",
            "margin, held out": "eval/margin",
            "margin, standard deviation, held out": "eval/margin_std",
        },
        "held-out steps": {
            "share of bad steps that are found, held out": "eval/bad_found",
            "loss, nats a step, held out": "eval/step_loss",
        },
    },
)


# All sinks.


class MetricWriter:
    """Writes to all sinks of a run on the main rank; does nothing on the other ranks.

    output_dir: the folder of metrics.jsonl, and of tensorboard/ unless `tensorboard_dir` names another folder.
    report_to: "tensorboard" and names of trackers (trackers.py). One that fails gets nothing more, and the run goes on,
        because metrics.jsonl has all metrics. project: the trackers' project.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        total_steps: int,
        resume_step: int | None = None,
        view: View = PPO_VIEW,
        report_to: Sequence[str] = (TENSORBOARD,),
        tensorboard_dir: str | Path | None = None,
        project: str = "rlhf",
    ):
        self._file = self._bar = self._clock = None
        self._sinks: dict[str, TensorBoardSink | TrackerSink] = {}
        if not is_main():
            return
        output_dir = Path(output_dir)
        self._clock = WallClock(redone=seconds_after(output_dir / METRICS_FILE, resume_step))
        self._file = JsonlSink(output_dir / METRICS_FILE, resume_step=resume_step)
        self._tensorboard_dir = Path(tensorboard_dir or output_dir / "tensorboard")
        for sink in report_to:
            with self._noted(sink):
                if sink == TENSORBOARD:
                    self._sinks[sink] = TensorBoardSink(self._tensorboard_dir, view=view, resume_step=resume_step)
                else:
                    self._sinks[sink] = TrackerSink(sink, output_dir, project=project, run_name=run_name(output_dir))
        self.count(total_steps, shown=view.bar, first_step=max(0, resume_step or 0))

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`, and the time since the previous line (called once per step).

        samples: number of responses (in steps 1 and 2, of examples) seen up to the end of this step. metrics: already
        reduced over the ranks."""
        metrics = {**metrics, **self.take_time()}
        if self._file and self._bar:
            self._file.log(step, samples, metrics)
            self._bar.log(step, samples, metrics)
        self._to_sinks(lambda sink: sink.log(step, samples, metrics))

    def count(self, total_steps: int, *, shown: Mapping[str, str], **how) -> None:
        """Begin a new progress bar of `total_steps` steps. The other arguments are those of `ProgressBar`."""
        if self._file is None:
            return
        if self._bar is not None:
            self._bar.close()
        self._bar = ProgressBar(total_steps, shown=shown, **how)

    def take_time(self) -> dict[str, float]:
        """The time since the last line, as metrics; the next line does not count this time again. Returns {} on all
        ranks but the main rank."""
        return self._clock.take() if self._clock else {}

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Show sampled responses: rows of `sample_rows`, with `prompt`, `response`, `score`, `kl`."""
        if self._bar:
            self._bar.write(f"samples, step {step}\n{samples_text(rows)}\n")
        self._to_sinks(lambda sink: sink.samples(step, rows))

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Write the distribution of `values` to TensorBoard. Only the main rank's `values` are written; gather the
        values of all ranks before, if they count too."""
        self._to_sinks(lambda sink: isinstance(sink, TensorBoardSink) and sink.histogram(step, tag, values))

    def hparams(self, settings: Mapping) -> None:
        """Write the run's settings. A nested setting gets the name outer/inner."""
        self._to_sinks(lambda sink: sink.hparams(settings))

    def write(self, text: str) -> None:
        """Print `text` on the main rank without breaking the progress bar."""
        if self._bar:
            self._bar.write(text)

    def close(self) -> None:
        """Flush buffered data, and end the progress bar and the trackers' runs."""
        if self._file and self._bar:
            self._file.flush()
            self._bar.close()
        self._to_sinks(lambda sink: sink.close())

    def _to_sinks(self, write: Callable[["TensorBoardSink | TrackerSink"], object]) -> None:
        for name, sink in list(self._sinks.items()):
            with self._noted(name):
                write(sink)

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """If the block raises an error, also one of a library's thread, print it, and write nothing more to this
        sink."""
        try:
            yield
        except Exception as error:
            self._sinks.pop(name, None)
            if name == TENSORBOARD:
                note_unwritten(self._tensorboard_dir, error)
            else:  # not `note_unwritten`, which would make the run's end a failure
                why = without_query(one_line(error))
                print_line(
                    f"WARNING: {name} gets no more metrics ({why}). The run goes on; metrics.jsonl has them all."
                )


def run_name(output_dir: Path) -> str:
    """The run's name in trackers: "FOLDER (PARENT)" for the output folder PARENT/FOLDER."""
    folder = output_dir.resolve()
    return f"{folder.name} ({folder.parent.name})"


# metrics.jsonl.


class JsonlSink:
    """Writes metrics.jsonl: a JSON object in each line, with `step`, `samples` and the metrics. Each line is written
    immediately, so that a killed run keeps its curves.

    NaN and infinities are written as null: JSON cannot express them, and most programs refuse the words that Python
    writes for them. If a line cannot be written (the disk is full), it is kept in memory and written with the next
    line. If the folder is moved or deleted during the run, a new file is begun at its path.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None):
        self._path, self._unwritten = Path(path), b""
        if resume_step is not None:
            truncate_after(path, resume_step)
        self.flush()

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        numbers = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        line = json.dumps({"step": step, "samples": samples, **numbers}, allow_nan=False) + "\n"
        self._unwritten += line.encode()
        self.flush()

    def flush(self) -> None:
        """Write the lines that could not be written before, if this is possible now."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                end, rest = file.seek(0, os.SEEK_END), self._unwritten
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(end)  # remove the half-written line
                    raise
            self._unwritten = b""
        except OSError as error:
            note_unwritten(self._path, error)
        else:
            note_written(self._path)


def truncate_after(path: str | Path, step: int) -> None:
    """Remove the lines whose step is greater than `step` from a metrics file, if the file exists.

    If the process is killed meanwhile, either the whole old file or the whole new file is there.
    """
    path = Path(path)
    if path.exists():
        write_whole(path, "".join(line for line, record in read_lines(path) if record["step"] <= step))


# TensorBoard.


class TensorBoardSink:
    """Writes one run's folder of TensorBoard events: scalars, texts, histograms, settings and the grouping of curves.

    Events cannot be removed from a file. Therefore a new file tells TensorBoard to hide the events after `resume_step`,
    or all earlier events if the run starts anew.
    """

    def __init__(self, log_dir: str | Path, *, view: View, resume_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter  # takes seconds, so only the main rank imports it

        threading.excepthook = _print_unless_tensorboards
        self._writer = SummaryWriter(str(log_dir), purge_step=0 if resume_step is None else resume_step + 1)
        self._with_bounds = {name for charts in view.held_out.values() for name in charts.values()}
        self._writer.add_custom_scalars(_layout(view))

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, and the lower and upper bounds that the held-out charts draw. The file is
        flushed at least every two minutes."""
        for name, value in {"samples": samples, **metrics}.items():
            self._writer.add_scalar(name, value, step)
            if name in self._with_bounds:
                margin = NOISE * metrics.get(f"{name}_se", 0.0)
                for bound, end in zip(_bounds(name), (value - margin, value + margin)):
                    self._writer.add_scalar(bound, end, step)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Write sampled responses as a table. TensorBoard's TEXT tab shows it above the tables of earlier steps."""
        self._writer.add_text("samples", samples_markdown(rows), step)

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Write the distribution of the finite values; write nothing if no value is finite."""
        values = values.detach().float().flatten()
        values = values[values.isfinite()]
        if values.numel():
            self._writer.add_histogram(tag, values, step)

    def hparams(self, settings: Mapping) -> None:
        """Write the settings as a text."""
        text = json.dumps(dict(settings), indent=2, default=str)
        self._writer.add_text("settings", "\n".join("    " + line for line in text.splitlines()), 0)

    def close(self) -> None:
        """Flush buffered events."""
        self._writer.close()


def _bounds(name: str) -> tuple[str, str]:
    """The names of a held-out metric's lower and upper bound."""
    below = name.removeprefix("eval/")
    return f"two_standard_errors/{below}_low", f"two_standard_errors/{below}_high"


def _layout(view: View) -> dict:
    """The layout of the Custom Scalars tab, for SummaryWriter.add_custom_scalars.

    Held-out metrics have only a few points. Smoothing (0.6 by default) would draw a line far from the points, so their
    charts are drawn with margins: TensorBoard does not smooth charts with margins. It shows them in reverse order. In
    the charts without margins, each name is a regular expression that matches the beginnings of metrics' names.
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


def _print_unless_tensorboards(failure: threading.ExceptHookArgs) -> None:
    """Print the stack trace of a thread that failed. For TensorBoard's thread nothing is printed: the next call of the
    library raises the thread's error."""
    if type(failure.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
        threading.__excepthook__(failure)


# Time and progress.

PHASES = {
    "time/critic_pretrain": "pretraining the critic",
    "time/evaluate": "evaluating",
    "time/normalize": "normalising",
    "time/save": "saving models",
}


class WallClock:
    """Measures how this process spends its time, in seconds by phase. The time before this object was made counts as
    start-up.

    redone: seconds that earlier processes spent on steps that this process makes again; the lines of these steps were
    removed from metrics.jsonl.
    """

    def __init__(self, redone: float = 0.0):
        self._first = {"time/start": sum(place.take_seconds().values())}
        if redone:
            self._first["time/redone"] = redone

    def take(self) -> dict[str, float]:
        """The time since the last call, as metrics: time/wall is the whole time, and each phase has its seconds."""
        phases, first = place.take_seconds(), self._first
        self._first = {}
        metrics = {"time/wall": sum(phases.values()) + sum(first.values()), **first}
        return metrics | {name: phases[phase] for name, phase in PHASES.items() if phase in phases}


def seconds_after(path: Path, step: int | None) -> float:
    """The seconds that a metrics file records for the steps after `step`; 0 if there is no file or `step` is None."""
    rows = read_metrics(path) if step is not None and path.is_file() else []
    return sum(row.get("time/wall", 0.0) for row in rows if row["step"] > step)


FIRST_INTERVAL, LAST_INTERVAL = 15.0, 600.0
"""The smallest and the largest number of seconds between progress lines in a log file."""
LINES_A_RUN = 100
"""Within these limits, the next line comes after 1 / LINES_A_RUN of the time that has passed: some hundred lines a
day."""


class ProgressBar:
    """Shows the run's progress on stderr: as a bar in a terminal, or as plain lines at growing intervals in a log file.

    The bar and the lines show the speed and the time left, computed from this process's steps only. shown: {label:
    metric}. unit: what is counted. below: a number that is added to each step's number before it is shown: the steps of
    the critic's pretraining are numbered from a negative number up to 0.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        shown: Mapping[str, str],
        first_step: int = 0,
        unit: str = "step",
        below: int = 0,
        stream=None,
        clock=time.monotonic,
    ):
        self._stream = sys.stderr if stream is None else stream
        self._total = total_steps
        self._first = first_step
        self._shown = shown
        self._clock = clock
        self._unit, self._below = unit, below
        self._started = self._due = clock()
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=total_steps, initial=first_step, unit=unit, file=self._stream, dynamic_ncols=True)

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Show the run's progress, and the metrics in `shown`."""
        step += self._below
        shown = {label: short(metrics[name]) for label, name in self._shown.items() if name in metrics}
        if self._bar is None:
            self._log_line(step, shown)
            return
        if shown:
            # Given as one text, because tqdm would format the numbers in its own way.
            self._bar.set_postfix_str(", ".join(f"{label} {value}" for label, value in shown.items()), refresh=False)
        self._bar.update(step - self._bar.n)
        self._bar.refresh()

    def _log_line(self, step: int, shown: Mapping[str, str]) -> None:
        now = self._clock()
        if now < self._due and step < self._total:
            return
        passed = now - self._started
        self._due = now + min(max(passed / LINES_A_RUN, FIRST_INTERVAL), LAST_INTERVAL)
        line = f"{self._unit} {step}/{self._total} ({step / max(self._total, 1):.0%})"
        if step > self._first:
            seconds = passed / (step - self._first)
            left = timedelta(seconds=round(seconds * (self._total - step)))
            line += f", {short(seconds)} s/{self._unit}, {left} left"
        self.write(", ".join([line, *(f"{label} {value}" for label, value in shown.items())]))

    def write(self, text: str) -> None:
        """Print `text` above the bar."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """End the progress bar; its last state stays on the screen."""
        if self._bar is not None:
            self._bar.close()


def short(value: float) -> str:
    """`value` with three significant digits: 1.25, 24.0, 3.00e-04; whole numbers up to 99999 in full."""
    size = abs(value)
    if size and not 1e-3 <= size < 1e5:
        return f"{value:.2e}"
    return f"{value:.0f}" if size >= 100 or not size else f"{value:#.3g}".rstrip(".")
