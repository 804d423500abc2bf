"""Trackers through accelerate: what they get, that a resumed run continues, and that a run outlives its trackers."""

from types import SimpleNamespace

import accelerate.tracking
import pytest

from engine.errors import UserError
from training.config.parsing import parse_flags
from training.config.supervised import SFTFlags
from training.reporting.sinks import MetricWriter
from training.reporting.trackers import check_trackers
from training.runtime.stopping import check_all_written

REQUIRED = ("--output_dir", "out", "--data_path", "d", "--model_name_or_path", "m")


@pytest.fixture
def calls(monkeypatch):
    """What is asked of stand-ins for accelerate's classes of W&B and MLflow, in order."""
    calls = []

    class Tracker:
        """A run gets the id of its number, unless one is named."""

        def __init__(self, project, **options):
            self.asked, self.tracker = (project, options), None

        def start(self):
            calls.append(("start", *self.asked))
            run = self.asked[1].get("id") or self.asked[1].get("run_id") or f"id_{len(calls)}"
            self.tracker = SimpleNamespace(id=run, info=SimpleNamespace(run_id=run))

        def store_init_configuration(self, values):
            calls.append(("settings", values))

        def log(self, values, step):
            calls.append(("log", values["x"], step))

        def finish(self):
            calls.append(("finish",))

    class WithTables(Tracker):
        def log_table(self, name, columns, data, step):
            calls.append(("table", columns, data, step))

    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", WithTables)
    for name in ("mlflow", "trackio"):
        monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, name, Tracker)
    return calls


def test_a_tracker_gets_settings_steps_and_samples_without_tensorboard(tmp_path, calls):
    folder = tmp_path / "out" / "ppo"
    writer = MetricWriter(folder, total_steps=2, report_to=["wandb"], project="films")
    writer.hparams({"lr": 1e-5, "dialect": {"lam": 0.95}, "data": ["a", "b"]})
    for step in (-1, 0, 1):  # -1 and 0 are the critic's pretraining
        writer.log(step, 64, {"x": step / 2})
    writer.samples(1, [{"prompt": "a", "response": "b", "score": 1.0}])
    writer.close()
    options = {"name": "ppo (out)", "dir": str(folder), "id": None, "resume": "allow"}
    assert calls == [
        ("start", "films", options | {"settings": {"x_disable_meta": True}}),  # else W&B records the command
        ("settings", {"lr": 1e-5, "dialect/lam": 0.95, "data": "['a', 'b']"}),
        ("log", 0.0, 0),
        ("log", 0.5, 1),
        ("table", ["prompt", "response", "score"], [["a", "b", 1.0]], 1),
        ("finish",),
    ]
    assert not (folder / "tensorboard").exists()


def test_a_resumed_run_continues_its_runs(tmp_path, calls):
    for resume_step in (None, 1):
        writer = MetricWriter(tmp_path, total_steps=2, report_to=["wandb", "mlflow"], resume_step=resume_step)
        writer.hparams({"max_steps": resume_step})
        writer.close()
    assert [(call[2].get("id"), call[2].get("run_id")) for call in calls if call[0] == "start"] == [
        (None, None),
        (None, None),
        ("id_1", None),
        (None, "id_2"),
    ]
    assert calls.count(("settings", {})) == 2  # of the new runs: MLflow refuses to change a setting


def test_a_resumed_run_tells_trackio_its_settings_which_it_has_forgotten(tmp_path, calls):
    for resume_step in (None, 1):
        writer = MetricWriter(tmp_path, total_steps=2, report_to=["trackio"], resume_step=resume_step)
        writer.hparams({"seed": 1})
        writer.close()
    assert calls.count(("settings", {"seed": 1})) == 2


def test_a_tracker_that_fails_is_left_and_the_run_goes_on(tmp_path, calls, monkeypatch, capfd):
    def log(self, values, step):
        calls.append(("log", "failed", step))
        raise ConnectionError("no way to https://user:secret@host/api?key=secret")

    classes = accelerate.tracking.LOGGER_TYPE_TO_CLASS
    monkeypatch.setitem(classes, "mlflow", type("Failing", (classes["mlflow"],), {"log": log}))
    writer = MetricWriter(tmp_path, total_steps=2, report_to=["mlflow", "wandb"])
    for step in (1, 2):
        writer.log(step, 64, {"x": 0.5})
    writer.close()
    assert [call for call in calls if call[0] != "start"] == [
        *(("log", "failed", 1), ("log", 0.5, 1), ("log", 0.5, 2), ("finish",))
    ]
    told = capfd.readouterr().err
    assert told.count("WARNING: mlflow gets no more metrics (no way to https://host/api). The run goes on") == 1
    assert "secret" not in told
    check_all_written()  # metrics.jsonl has everything, so the run's end is no failure


def test_a_package_that_is_not_installed_is_named_before_any_work(monkeypatch):
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", ["tensorboard", "wandb"])
    check_trackers(["tensorboard", "wandb"])
    with pytest.raises(UserError, match="--report_to trackio: the package trackio is not installed"):
        check_trackers(["wandb", "trackio"])


@pytest.mark.parametrize(
    ("words", "reports"),
    [
        ((), ["tensorboard"]),
        (("--report_to", "mlflow", "trackio"), ["mlflow", "trackio"]),
        (("--report_to", "none"), []),
        (("--enable_tensorboard", "false"), []),
        (("--report_to", "wandb", "tensorboard", "--enable_tensorboard", "false"), ["wandb"]),
    ],
)
def test_where_flags_send_metrics(words, reports):
    assert parse_flags(SFTFlags, [*REQUIRED, *words], "").reports == reports


def test_an_unknown_tracker_is_refused():
    with pytest.raises(UserError, match="invalid choice: 'tensorbord'"):
        parse_flags(SFTFlags, [*REQUIRED, "--report_to", "wandb", "tensorbord"], "")
    with pytest.raises(UserError, match="--report_to wandb tensorbord: known are tensorboard, wandb, "):
        SFTFlags(output_dir="o", data_path=["d"], model_name_or_path="m", report_to=["wandb", "tensorbord"]).validate()
