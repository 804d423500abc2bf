"""The sinks: valid JSON lines, exact truncation on resume, everything on the main rank, TensorBoard, whose events
are not doubled; and what cannot be written is told once and makes the run's end a failure.
"""

import contextlib
import json
import re
import resource
import threading

import pytest
import torch

from engine.errors import RunStopped, UserError
from scripts.harness.programs import metric_lines
from training.reporting import run_record, sinks
from training.reporting.run_record import read_lines
from training.reporting.sinks import JsonlSink, MetricWriter, TensorBoardSink, truncate_after
from training.reporting.trackers import flattened
from training.runtime import stopping
from training.runtime.stopping import check_all_written


def test_jsonl_lines_are_valid_json_and_there_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "new" / "metrics.jsonl")
    sink.log(1, 64, {"a": torch.tensor(0.5), "b": float("nan"), "c": float("-inf")})
    text = (tmp_path / "new" / "metrics.jsonl").read_text()  # before close: a killed run keeps its lines
    assert text == '{"step": 1, "samples": 64, "a": 0.5, "b": null, "c": null}\n'


def test_resume_drops_later_steps_and_half_a_line_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(5):
        sink.log(step, 10 * step, {"x": step / 4})
    kept = path.read_text().splitlines(keepends=True)[:3]
    with path.open("a") as file:
        file.write('{"step": 2, "samp')
    sink = JsonlSink(path, resume_step=2)
    sink.log(3, 30, {"x": 7.0})
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

    monkeypatch.setattr(run_record.os, "fsync", fail)
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
    writer = MetricWriter(tmp_path, total_steps=2, report_to=())
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


def events_in(log_dir):
    """What TensorBoard reads from a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log_dir))
    events.Reload()
    return events


def _sink(log_dir, **options) -> TensorBoardSink:
    return TensorBoardSink(log_dir, **{"view": sinks.PPO_VIEW, **options})


def test_what_came_after_the_restart_step_is_hidden(tmp_path):
    first = _sink(tmp_path)
    first.hparams({"lr": 1e-5})
    for step in (1, 2, 3):
        first.log(step, step * 10, {"policy/loss": float(step)})
    first.close()
    second = _sink(tmp_path, resume_step=2)
    second.log(3, 30, {"policy/loss": 9.0})
    second.samples(3, [{"prompt": "a", "response": "b"}])
    second.histogram(3, "advantages", torch.tensor([1.0, float("nan"), 3.0]))
    second.histogram(3, "nothing", torch.zeros(0))
    second.close()
    events = events_in(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("policy/loss")] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert [e.value for e in events.Scalars("samples")] == [10.0, 20.0, 30.0]
    assert b"1e-05" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]
    assert events.Tensors("samples/text_summary")[0].step == 3
    assert events.Tags()["histograms"] == ["advantages"]
    assert events.Histograms("advantages")[0].histogram_value.num == 2


def test_what_an_earlier_run_left_in_the_folder_is_hidden(tmp_path):
    for value, steps in ((1.0, 3), (2.0, 1)):
        sink = _sink(tmp_path)
        for step in range(steps):
            sink.log(step, step, {"policy/loss": value})
        sink.close()
    assert [(e.step, e.value) for e in events_in(tmp_path).Scalars("policy/loss")] == [(0, 2.0)]


def _sections(log_dir) -> dict[str, dict[str, object]]:
    """The charts of the Custom Scalars tab, by section and title."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    (event,) = events_in(log_dir).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    return {section.title: {chart.title: chart for chart in section.chart} for section in layout.category}


def test_curves_are_grouped_by_exact_names(tmp_path):
    _sink(tmp_path).close()
    sections = _sections(tmp_path)
    assert list(sections) == [*sinks.PPO_VIEW.held_out, *sinks.PPO_VIEW.charts]
    (kl,) = (chart for title, chart in sections["score and KL"].items() if title.startswith("KL to the reference"))
    names = ("objective/kl", "objective/kl_coef", "objective/kl_per_token", "eval/kl", "eval/ema_kl")
    # the plugin asks re.match for each tag, as here
    assert {name for name in names if any(re.match(tag, name) for tag in kl.multiline.tag)} == {"objective/kl"}


def test_held_out_metrics_have_margins_of_two_standard_errors(tmp_path):
    """Such charts are not smoothed. One needs a value and both bounds at the same steps, or it shows an error."""
    sink = _sink(tmp_path, view=sinks.averaged_view(sinks.PPO_VIEW))
    sink.log(0, 0, {"eval/score": 1.0, "eval/score_se": 0.25, "eval/distinct_bigrams": 700.0})
    sink.log(1, 8, {"objective/scores": 1.0})
    sink.log(2, 16, {"eval/score": 2.0, "eval/score_se": 0.5, "eval/ema_score": 1.5, "eval/distinct_bigrams": 600.0})
    sink.close()
    sections, events = _sections(tmp_path), events_in(tmp_path)

    def drawn(section: str, title: str) -> list[list[tuple[int, float]]]:
        (series,) = sections[section][title].margin.series
        return [[(e.step, e.value) for e in events.Scalars(t)] for t in (series.value, series.lower, series.upper)]

    assert drawn("held-out prompts", "score, held out") == [
        [(0, 1.0), (2, 2.0)],
        [(0, 0.5), (2, 1.0)],
        [(0, 1.5), (2, 3.0)],
    ]
    assert drawn("held-out prompts", "distinct bigrams, held out") == [[(0, 700.0), (2, 600.0)]] * 3
    assert drawn("held-out prompts, EMA", "score, held out, EMA") == [[(2, 1.5)]] * 3


def test_charts_of_one_step_draw_nothing_of_another(tmp_path):
    """Of steps 1 and 2 in one TensorBoard, which share the names that say the same of both."""
    drawn = [
        {name for charts in view.charts.values() for names in charts.values() for name in names}
        | {name for charts in view.held_out.values() for name in charts.values()}
        for view in (sinks.SFT_VIEW, sinks.REWARD_VIEW)
    ]
    shared = {name for name in drawn[0] & drawn[1] if not name.startswith("time/")}
    assert shared == {"train/lr", "train/grad_norm", "memory/peak_gb"}


def test_settings_become_one_flat_row():
    settings = {"a": 1, "b": {"c": {"d": False}, "e": None}, "f": (1, 2)}
    assert flattened(settings) == {"a": 1, "b/c/d": False, "f": "(1, 2)"}


@pytest.mark.parametrize("view", [sinks.PPO_VIEW, sinks.SFT_VIEW, sinks.REWARD_VIEW])
def test_no_curve_stands_in_two_charts_of_a_view(view):
    names = [name for charts in view.charts.values() for names in charts.values() for name in names]
    names += [name for charts in view.held_out.values() for name in charts.values()]
    assert len(names) == len(set(names))


@pytest.fixture(autouse=True)
def nothing_noted():
    stopping.forget_unwritten()
    yield
    stopping.forget_unwritten()


@contextlib.contextmanager
def files_of_at_most(size: int):
    """The system refuses to let a file of this process grow beyond `size` bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_that_find_no_space_are_kept_and_written_later(tmp_path, capsys):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, 4, {"loss": 1.0})
    first = (tmp_path / "metrics.jsonl").read_text()
    with files_of_at_most(len(first) + 10):  # the next line is begun, and cannot be ended
        sink.log(2, 8, {"loss": 2.0})
        sink.log(3, 12, {"loss": 3.0})
    assert (tmp_path / "metrics.jsonl").read_text() == first
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written") == 1
    with pytest.raises(RunStopped, match=r"not all of it is on the disk: .*metrics\.jsonl \(File too large\)"):
        check_all_written()
    sink.log(4, 16, {"loss": 4.0})
    assert [(line["step"], line["loss"]) for line in metric_lines(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert "nothing of it is missing" in capsys.readouterr().err
    check_all_written()


def test_a_folder_that_is_moved_away_gets_no_more_lines(tmp_path):
    out = tmp_path / "out"
    sink = JsonlSink(out / "metrics.jsonl")
    sink.log(1, 4, {"loss": 1.0})
    out.rename(tmp_path / "moved")
    sink.log(2, 8, {"loss": 2.0})
    assert [line["step"] for line in metric_lines(out)] == [2]
    assert [line["step"] for line in metric_lines(tmp_path / "moved")] == [1]
    check_all_written()


def test_tensorboard_without_space_is_told_without_a_stack_trace(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # in place of pytest's
    writer = MetricWriter(tmp_path, total_steps=1)
    with files_of_at_most(100):
        writer.histogram(1, "scores", torch.arange(1000.0))
        writer.close()
    said = capsys.readouterr().err
    assert f"{tmp_path}/tensorboard cannot be written" in said
    assert "Traceback" not in said


def test_a_sink_that_fails_is_told_once_and_left_out(tmp_path, capfd, monkeypatch):
    class Sink:
        calls = 0

        def __init__(self, folder, **how):
            pass

        def log(self, step, samples, metrics):
            Sink.calls += 1
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks, "TensorBoardSink", Sink)
    writer = MetricWriter(tmp_path, total_steps=2)
    writer.log(1, 4, {})
    writer.log(2, 8, {})
    writer.close()
    assert Sink.calls == 1
    warning = f"{tmp_path}/tensorboard cannot be written (No space left on device: free some space). The run goes on."
    assert capfd.readouterr().err.count(f"WARNING: {warning}\n") == 1
    with pytest.raises(RunStopped):
        check_all_written()
