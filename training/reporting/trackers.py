"""Sends a run's metrics to experiment trackers, such as Weights & Biases, through the classes of accelerate.tracking.

check_trackers(["wandb"])                                    # before any work
sink = TrackerSink("wandb", output_dir, project="films", run_name="ppo (out)")
sink.hparams({"lr": 1e-5})
sink.log(step, samples, metrics)
sink.close()
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from engine.errors import UserError
from engine.whole_files import write_whole

RUNS_FILE = "trackers.json"
"""The file {tracker: its id of the run} in the output folder. A resumed run continues the runs that it names."""

# {tracker: (name and folder of the run, the tracker's id of the run or None) -> arguments of accelerate's class}. W&B
# and SwanLab would record the command and the address of Git's remote, which may contain passwords and keys.
OPTIONS: dict[str, Callable[[str, Path, str | None], dict]] = {
    "wandb": lambda name, folder, run: {
        "name": name,
        "dir": str(folder),
        "id": run,
        "resume": "allow",
        "settings": {"x_disable_meta": True},
    },
    "mlflow": lambda name, folder, run: {"run_name": name, "run_id": run},
    "trackio": lambda name, folder, run: {"name": name, "resume": "allow" if run else "never"},
    "swanlab": lambda name, folder, run: {
        "name": name,
        "log_dir": str(folder / "swanlab"),
        "id": run,
        "resume": "allow",
        "settings": {"probe": {"runtime": False, "git": False}},
    },
}


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise UserError if the package of a tracker is not installed."""
    names = [name for name in report_to if name in OPTIONS]
    if not names:
        return
    from accelerate.tracking import get_available_trackers

    installed = set(map(str, get_available_trackers()))
    for name in (name for name in names if name not in installed):
        raise UserError(
            f"--report_to {name}: the package {name} is not installed. pip install {name}, or leave {name} out."
        )


class TrackerSink:
    """Writes to one tracker (the main rank alone makes it). Each method may raise any exception.

    name: a key of OPTIONS. project: the name under which the tracker collects runs; in MLflow, the experiment.
    """

    def __init__(self, name: str, folder: Path, *, project: str, run_name: str):
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        file = folder / RUNS_FILE
        runs = json.loads(file.read_text()) if file.exists() else {}
        PartialState()  # accelerate's messages need it
        self._resumed = name in runs
        self._tracker = LOGGER_TYPE_TO_CLASS[name](project, **OPTIONS[name](run_name, folder, runs.get(name)))
        self._tracker.start()
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
            self._tracker.log_table("samples", list(rows[0]), [list(row.values()) for row in rows], step=step)

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Does nothing: accelerate's classes have no histograms."""

    def hparams(self, settings: Mapping) -> None:
        """Write the settings of a new run. Those of a resumed run stay: MLflow refuses to change them."""
        if not self._resumed:
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
