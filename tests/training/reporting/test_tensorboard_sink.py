"""TensorBoard events: nothing twice after a resume, curves grouped, settings in the table of runs."""

import re

import pytest
import torch

from training.reporting import sinks
from training.reporting.sinks import TensorBoardSink, flattened


def events_in(log_dir):
    """What TensorBoard reads from a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log_dir))
    events.Reload()
    return events


def _sink(log_dir, **options) -> TensorBoardSink:
    return TensorBoardSink(log_dir, **{"name": "ppo (out)", "view": sinks.PPO_VIEW, **options})


def test_what_came_after_the_restart_step_is_hidden(tmp_path):
    first = _sink(tmp_path)
    first.hparams({"lr": 1e-5})
    for step in (1, 2, 3):
        first.log(step, step * 10, {"policy/loss": float(step)})
    first.close()
    second = _sink(tmp_path, resume_step=2)
    second.log(3, 30, {"policy/loss": 9.0})
    second.text(3, "samples", "| a |")
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


def test_files_are_read_in_the_order_in_which_they_were_begun(tmp_path, monkeypatch):
    """By name, in which this process's number of the file comes last: 10 before 9."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    for value in (1.0, 2.0):
        sink = _sink(tmp_path, resume_step=0)
        sink.log(1, 1, {"policy/loss": value})
        sink.close()
    assert [e.value for e in events_in(tmp_path).Scalars("policy/loss")] == [2.0]


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


def test_the_table_of_runs_has_settings_and_metrics_of_this_very_run(tmp_path):
    from tensorboard.plugins.hparams import metadata

    sink = _sink(tmp_path)
    sink.hparams(
        {
            "seed": 7,
            "offload": True,
            "stop": ["a", "b"],
            "resume": None,
            "resolved_dialect": {"name": "default", "kl_coef": 0.1, "score_clip": None},
        }
    )
    sink.close()
    events = events_in(tmp_path)

    def content(tag):
        return events.SummaryMetadata(tag).plugin_data.content

    experiment = metadata.parse_experiment_plugin_data(content(metadata.EXPERIMENT_TAG))
    assert [info.name.tag for info in experiment.metric_infos][:2] == ["eval/score", "eval/kl"]
    assert {info.name for info in experiment.hparam_infos if info.differs} == {
        "seed",
        "resolved_dialect/name",
        "resolved_dialect/kl_coef",
    }  # seen at once; the others can be ticked
    session = metadata.parse_session_start_info_plugin_data(content(metadata.SESSION_START_INFO_TAG))
    assert session.group_name == "ppo (out)"
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in session.hparams.items()}
    assert values == {
        "seed": 7.0,
        "offload": True,
        "stop": "['a', 'b']",
        "resolved_dialect/name": "default",
        "resolved_dialect/kl_coef": 0.1,
    }
    assert {path.parent for path in tmp_path.rglob("events*")} == {tmp_path}, "the run must not be split in two"


def test_settings_become_one_flat_row():
    settings = {"a": 1, "b": {"c": {"d": False}, "e": None}, "f": (1, 2)}
    assert flattened(settings) == {"a": 1, "b/c/d": False, "f": "(1, 2)"}


@pytest.mark.parametrize("view", [sinks.PPO_VIEW, sinks.SFT_VIEW, sinks.REWARD_VIEW])
def test_no_curve_stands_in_two_charts_of_a_view(view):
    names = [name for charts in view.charts.values() for names in charts.values() for name in names]
    names += [name for charts in view.held_out.values() for name in charts.values()]
    assert len(names) == len(set(names))
    assert set(view.compared) | set(view.bar.values()) <= set(names), "what is compared is also drawn"
