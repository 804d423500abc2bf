"""The sinks: valid JSON lines, exact truncation on resume, TensorBoard events, plain progress lines, one rank only."""
import io
import json
import re

import pytest
import torch

from engine.errors import UserError
from training import sinks
from training.sinks import JsonlSink, MetricWriter, ProgressBar, TensorBoardSink, read_lines, truncate_after


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

    monkeypatch.setattr(sinks.os, "fsync", fail)
    with pytest.raises(OSError):
        truncate_after(path, 1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"loss": 1.0}'])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 2"):
        read_lines(path)


def _events(log_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log_dir))
    events.Reload()
    return events


def test_tensorboard_hides_what_came_after_the_restart_step(tmp_path):
    first = TensorBoardSink(tmp_path)
    first.hparams({"lr": 1e-5})
    for step in (1, 2, 3):
        first.log(step, step * 10, {"policy/loss": float(step)})
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=2)
    second.log(3, 30, {"policy/loss": 9.0})
    second.text(3, "samples", "| a |")
    second.histogram(3, "advantages", torch.tensor([1.0, float("nan"), 3.0]))
    second.histogram(3, "nothing", torch.zeros(0))
    second.close()
    events = _events(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("policy/loss")] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert [e.value for e in events.Scalars("samples")] == [10.0, 20.0, 30.0]
    assert b"1e-05" in events.Tensors("hparams/text_summary")[0].tensor_proto.string_val[0]
    assert events.Tensors("samples/text_summary")[0].step == 3
    assert events.Tags()["histograms"] == ["advantages"]
    assert events.Histograms("advantages")[0].histogram_value.num == 2


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


METRICS = {"objective/scores": 1.25, "objective/kl": 0.5, "rollout/response_length": 24.0}


def test_progress_in_a_file_is_plain_lines_at_intervals():
    stream, clock = io.StringIO(), Clock()
    bar = ProgressBar(20, first_step=10, stream=stream, interval=15.0, clock=clock)
    bar.log(10, 640, {"eval/score": 1.0})
    for step in range(11, 21):
        clock.now += 4.0
        bar.log(step, 64 * step, METRICS)
    bar.close()
    shown = ", score 1.250, kl 0.500, length 24.000\n"
    assert stream.getvalue() == (
        "step 10/20 (50%)\n"
        "step 14/20 (70%), 4.00 s/step, 0:00:24 left" + shown +
        "step 18/20 (90%), 4.00 s/step, 0:00:08 left" + shown +
        "step 20/20 (100%), 4.00 s/step, 0:00:00 left" + shown)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_terminal_is_one_bar():
    stream = Terminal()
    bar = ProgressBar(4, first_step=1, stream=stream)
    bar.log(2, 128, METRICS)
    bar.write("a table")
    bar.log(4, 256, {})
    bar.close()
    text = stream.getvalue()
    assert "2/4" in text and "4/4" in text and "score=1.250, kl=0.500, length=24.000" in text
    assert re.search(r"(^|[\r\n])a table\n", text)


def test_writer_writes_everything_on_the_main_rank(tmp_path, capsys):
    writer = MetricWriter(tmp_path, total_steps=2)
    writer.hparams({"lr": 1e-5})
    writer.log(1, 64, METRICS)
    writer.samples(1, [{"prompt": "The film", "response": " was good", "score": 1.0, "kl": 0.5}])
    writer.histogram(1, "advantages", torch.ones(3))
    writer.write("saved")
    writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "samples": 64, **METRICS}
    tags = _events(tmp_path / "tensorboard").Tags()
    assert set(tags["scalars"]) == {"samples", *METRICS}
    assert set(tags["tensors"]) == {"hparams/text_summary", "samples/text_summary"}
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
    monkeypatch.setattr("training.sinks.is_main", lambda: False)
    writer = MetricWriter(tmp_path / "run", total_steps=2)
    writer.hparams({"lr": 1e-5})
    writer.log(1, 64, METRICS)
    writer.samples(1, [{"prompt": "a", "response": "b"}])
    writer.histogram(1, "advantages", torch.ones(3))
    writer.write("saved")
    writer.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().err == ""
