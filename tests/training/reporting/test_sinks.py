"""The sinks: valid JSON lines, exact truncation on resume, everything on the main rank, W&B before TensorBoard."""

import importlib.machinery
import json
import re
import sys
import types

import pytest
import torch

from engine.errors import UserError
from tests.training.reporting.test_tensorboard_sink import events_in
from training.reporting import records, sinks
from training.reporting.records import read_lines
from training.reporting.sinks import JsonlSink, MetricWriter, check_wandb, truncate_after


def test_jsonl_lines_are_valid_json_and_there_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "new" / "metrics.jsonl")
    sink.log(1, 64, {"a": torch.tensor(0.5), "b": float("nan"), "c": float("-inf")})
    text = (tmp_path / "new" / "metrics.jsonl").read_text()  # before close: a killed run keeps its lines
    assert text == '{"step": 1, "samples": 64, "a": 0.5, "b": null, "c": null}\n'
    sink.close()


def test_resume_drops_later_steps_and_half_a_line_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(5):
        sink.log(step, 10 * step, {"x": step / 4})
    sink.close()
    kept = path.read_text().splitlines(keepends=True)[:3]
    with path.open("a") as file:
        file.write('{"step": 2, "samp')
    sink = JsonlSink(path, resume_step=2)
    sink.log(3, 30, {"x": 7.0})
    sink.close()
    assert path.read_text() == "".join(kept) + '{"step": 3, "samples": 30, "x": 7.0}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_at_the_very_end_keeps_whole_lines_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    truncate_after(path, 9)
    assert path.read_text() == '{"step": 1}\n'
    truncate_after(tmp_path / "absent.jsonl", 9)
    assert not (tmp_path / "absent.jsonl").exists()


def test_a_failed_truncation_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(records.os, "fsync", fail)
    with pytest.raises(OSError):
        truncate_after(path, 1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"loss": 1.0}'])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 2"):
        read_lines(path)


METRICS = {"objective/scores": 1.25, "objective/kl": 0.5, "rollout/response_length": 24.0}


def test_writer_writes_everything_on_the_main_rank(tmp_path, capsys):
    writer = MetricWriter(tmp_path, total_steps=2)
    writer.hparams({"lr": 1e-5})
    writer.log(1, 64, METRICS)
    writer.samples(1, [{"prompt": "The film", "response": " was good", "score": 1.0, "kl": 0.5}])
    writer.histogram(1, "advantages", torch.ones(3))
    writer.write("saved")
    writer.close()
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    times = {name: written.pop(name) for name in ("time/wall", "time/start")}
    assert written == {"step": 1, "samples": 64, **METRICS}
    tags = events_in(tmp_path / "tensorboard").Tags()
    assert set(tags["scalars"]) == {"samples", *METRICS, *times}
    assert {"settings/text_summary", "samples/text_summary"} <= set(tags["tensors"])
    shown = capsys.readouterr().err
    assert "step 1/2 (50%)" in shown and "The film" in shown and shown.endswith("saved\n")
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", shown)


def test_writer_without_tensorboard(tmp_path):
    writer = MetricWriter(tmp_path, total_steps=2, tensorboard=False)
    writer.hparams({})
    writer.samples(1, [])
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_writer_does_nothing_on_other_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("training.reporting.sinks.is_main", lambda: False)
    writer = MetricWriter(tmp_path / "run", total_steps=2)
    writer.hparams({"lr": 1e-5})
    writer.log(1, 64, METRICS)
    writer.samples(1, [{"prompt": "a", "response": "b"}])
    writer.histogram(1, "advantages", torch.ones(3))
    writer.write("saved")
    writer.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().err == ""


def test_events_go_where_they_are_wanted(tmp_path):
    writer = MetricWriter(tmp_path / "run", total_steps=2, tensorboard_dir=tmp_path / "elsewhere")
    writer.log(1, 64, METRICS)
    writer.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    assert "objective/kl" in events_in(tmp_path / "elsewhere").Tags()["scalars"]


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, and what was asked of it, in order."""
    calls = []

    class Config:
        def update(self, settings, **options):
            calls.append(("config", settings))

    class Run:
        config = Config()

        def finish(self):
            calls.append(("finish",))

    def init(**options):
        calls.append(("init", options))
        return Run()

    module = types.ModuleType("wandb")
    module.init = init
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="stand-in")
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(sinks, "TensorBoardSink", lambda *_, **__: calls.append(("TensorBoard",)) or FakeTensorBoard())
    return calls


class FakeTensorBoard:
    def log(self, *_):
        pass

    def hparams(self, *_):
        pass

    def close(self):
        pass


def test_wandb_listens_before_tensorboard_writes_and_is_told_the_settings(tmp_path, wandb):
    writer = MetricWriter(tmp_path / "out" / "ppo", total_steps=2, wandb_project="films")
    writer.hparams({"lr": 1e-5, "resolved_dialect": {"lam": 0.95}})
    writer.log(1, 64, METRICS)
    writer.close()
    assert wandb == [
        (
            "init",
            {"project": "films", "name": "ppo (out)", "dir": str(tmp_path / "out" / "ppo"), "sync_tensorboard": True},
        ),
        ("TensorBoard",),
        ("config", {"lr": 1e-5, "resolved_dialect": {"lam": 0.95}}),
        ("finish",),
    ]


def test_wandb_is_left_alone_unless_asked_for_and_on_other_ranks(tmp_path, wandb, monkeypatch):
    MetricWriter(tmp_path, total_steps=2).close()
    monkeypatch.setattr("training.reporting.sinks.is_main", lambda: False)
    MetricWriter(tmp_path, total_steps=2, wandb_project="films").close()
    assert wandb == [("TensorBoard",)]


def test_what_wandb_lacks_is_told_before_any_work(wandb):
    check_wandb("films")
    check_wandb(None, tensorboard=False)
    with pytest.raises(UserError, match="--wandb_project films.*TensorBoard, which is switched off"):
        check_wandb("films", tensorboard=False)
    with pytest.raises(UserError, match="--wandb_project ' ': give the project a name"):
        check_wandb(" ")


def test_wandb_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="--wandb_project films: .* not installed. pip install wandb"):
        check_wandb("films")
    (tmp_path / "wandb").mkdir()  # W&B's own folder of logs: Python could import it, and it is no package
    importlib.invalidate_caches()
    with pytest.raises(UserError, match="not installed"):
        check_wandb("films")
    check_wandb(None)
