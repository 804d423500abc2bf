"""Sends a run's metrics to experiment trackers, such as Weights & Biases, through the classes of accelerate.tracking.
A sink is used like a TensorBoardSink (sinks.py), but gets no histograms, which accelerate's classes lack.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.atomic_files import write_whole
from engine.errors import UserError

RUNS_FILE = "trackers.json"
"""The file {tracker: its id of the run} in the output folder. A resumed run continues the runs that it names."""

TRACKERS = ("wandb", "mlflow", "trackio", "swanlab")


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise UserError if the package of a tracker is not installed."""
    if wanted := set(TRACKERS).intersection(report_to):
        from accelerate.tracking import get_available_trackers

        for name in sorted(wanted.difference(map(str, get_available_trackers()))):
            raise UserError(
                f"--report_to {name}: the package {name} is not installed. pip install {name}, or leave {name} out."
            )


def _options(tracker: str, name: str, folder: Path, run: str | None) -> dict:
    """Arguments of accelerate's class. name, folder: of the run. run: the tracker's id of the run that is resumed. W&B
    and SwanLab would record the command and the address of Git's remote, which may contain passwords and keys."""
    if tracker == "mlflow":
        return {"run_name": name, "run_id": run}
    if tracker == "trackio":
        return {"name": name, "resume": "allow" if run else "never"}
    options = {"name": name, "id": run, "resume": "allow"}
    if tracker == "wandb":
        return {**options, "dir": str(folder), "settings": {"x_disable_meta": True}}
    return {**options, "log_dir": str(folder / "swanlab"), "settings": {"probe": {"runtime": False, "git": False}}}


class TrackerSink:
    """Writes to one tracker (the main rank alone makes it). Each method may raise any exception.

    name: one of TRACKERS. project: the name under which the tracker collects runs; in MLflow, the experiment.
    """

    def __init__(self, name: str, folder: Path, *, project: str, run_name: str):
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        file = folder / RUNS_FILE
        runs = json.loads(file.read_text()) if file.exists() else {}
        PartialState()  # accelerate's messages need it
        # MLflow refuses to change the settings of a resumed run; trackio forgets them.
        self._takes_settings = name not in runs or name == "trackio"
        self._tracker = LOGGER_TYPE_TO_CLASS[name](project, **_options(name, run_name, folder, runs.get(name)))
        on_interrupt = signal.getsignal(signal.SIGINT)  # SwanLab would end its run at Ctrl-C, before the last step
        self._tracker.start()
        signal.signal(signal.SIGINT, on_interrupt)
        run = self._tracker.tracker
        runs[name] = run.info.run_id if name == "mlflow" else run.id
        write_whole(file, json.dumps(runs))

    def log(self, step: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. Steps below 0, which are the critic's pretraining, are left out: W&B and SwanLab
        refuse them."""
        if step >= 0:
            self._tracker.log({"samples": samples, **{name: float(value) for name, value in metrics.items()}}, step)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Write sampled responses as a table; of the trackers, only W&B has tables."""
        if rows and hasattr(self._tracker, "log_table"):
            cells = [
                [json.dumps(cell, ensure_ascii=False) if isinstance(cell, list) else cell for cell in row.values()]
                for row in rows
            ]
            self._tracker.log_table("samples", list(rows[0]), cells, step=step)

    def hparams(self, settings: Mapping) -> None:
        """Write the run's settings, where the tracker does not have them already."""
        if self._takes_settings:
            self._tracker.store_init_configuration(flattened(settings))

    def close(self) -> None:
        """End the run in the tracker."""
        self._tracker.finish()


def flattened(settings: Mapping, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Settings as one flat dict: a nested setting gets the name outer/inner, lists become texts, and settings that are
    None are left out."""
    flat = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}/")
        elif value is not None:
            flat[prefix + name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat
