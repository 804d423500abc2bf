"""Scalars, texts, histograms, settings and the grouping of curves, as TensorBoard events."""

import json
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from training.reporting.standard_errors import NOISE
from training.reporting.views import View

MOST_BEHIND = 10.0
"""Seconds that are waited for, at most, where another machine's clock was ahead of this one's."""


class TensorBoardSink:
    """One run's folder of events.

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
        from tensorboard.plugins.hparams import summary_v2  # by hparams.api it needs TensorFlow

        row = flattened(settings)
        self._writer.file_writer.add_summary(_table(row, self._view))
        self._writer.file_writer.add_summary(summary_v2.hparams_pb(row, trial_id=self._name))
        text = json.dumps(dict(settings), indent=2, default=str)
        self._writer.add_text("settings", "\n".join("    " + line for line in text.splitlines()), 0)

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()


def _wait_for_a_later_name(log_dir: Path) -> None:
    """Wait until the clock is past the second in which the folder's newest file was begun, where it is not.

    TensorBoard reads a folder's files in the order of their names, `events.out.tfevents.SECOND.HOST.PROCESS.NUMBER`,
    whatever they say of each other; of two of one second the later one may come first, as "10" is before "9".
    """
    seconds = [re.match(r"events\.out\.tfevents\.(\d+)", path.name) for path in log_dir.glob("events.out.tfevents.*")]
    behind = max((int(found[1]) + 1 - time.time() for found in seconds if found), default=0.0)
    if behind > MOST_BEHIND:
        print(
            f"WARNING: {log_dir} has a file that was begun {behind:,.0f} seconds after this machine's clock. "
            "TensorBoard reads it behind this run's, and may hide steps of this one; metrics.jsonl has them. Set the "
            "clock, or move that file elsewhere.",
            file=sys.stderr,
            flush=True,
        )
    elif behind > 0:
        time.sleep(behind)


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


def _table(row: Mapping, view: View):
    """The columns of the HPARAMS table, as a summary: all settings of `row`, the metrics that compare runs.

    `differs` only makes columns visible from the start; hparams_config_pb has no word for it.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import Experiment, HParamInfo, MetricInfo, MetricName
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    experiment = Experiment(
        hparam_infos=[HParamInfo(name=name, differs=name in view.tuned) for name in row],
        metric_infos=[MetricInfo(name=MetricName(tag=name)) for name in view.compared],
    )
    data = metadata.create_summary_metadata(HParamsPluginData(experiment=experiment))
    return Summary(value=[Summary.Value(tag=metadata.EXPERIMENT_TAG, metadata=data, tensor=metadata.NULL_TENSOR)])
