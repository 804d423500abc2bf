"""Progress: one bar in a terminal, few lines in a log file; the time that is told is the time that passed."""

import io
import itertools
import re
import time

import psutil
import pytest

from tests.training.reporting.metric_rows import write
from training.reporting.sinks import MetricWriter, ProgressBar, WallClock, seconds_after, short
from training.reporting.summary import seconds_by_part, time_lines
from training.runtime import processes
from training.runtime.processes import OUTSIDE, Place, phase

SHOWN = {"score": "objective/scores", "lr": "policy/lr"}
METRICS = {"objective/scores": 1.25, "policy/lr": 3e-4}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_log_file_gets_plain_lines_at_intervals():
    stream, clock = io.StringIO(), Clock()
    bar = ProgressBar(20, shown=SHOWN, first_step=10, stream=stream, clock=clock)
    bar.log(10, 640, {"eval/score": 1.0})
    for step in range(11, 21):
        clock.now += 4.0
        bar.log(step, 64 * step, METRICS)
    bar.close()
    shown = ", score 1.25, lr 3.00e-04\n"
    assert stream.getvalue() == (
        "step 10/20 (50%)\n"
        "step 14/20 (70%), 4.00 s/step, 0:00:24 left"
        + shown
        + "step 18/20 (90%), 4.00 s/step, 0:00:08 left"
        + shown
        + "step 20/20 (100%), 4.00 s/step, 0:00:00 left"
        + shown
    )


def test_other_units_than_steps():
    stream, clock = io.StringIO(), Clock()
    bar = ProgressBar(4, shown={}, unit="batch", stream=stream, clock=clock)
    clock.now += 2.0
    bar.log(1, 16, {})
    assert stream.getvalue() == "batch 1/4 (25%), 2.00 s/batch, 0:00:06 left\n"


def test_steps_that_are_numbered_from_below_0_are_counted_from_1():
    stream, clock = io.StringIO(), Clock()
    bar = ProgressBar(4, shown={}, first_step=1, below=4, stream=stream, clock=clock)
    clock.now += 2.0
    bar.log(-2, 0, {})
    assert stream.getvalue() == "step 2/4 (50%), 2.00 s/step, 0:00:04 left\n"


def _moments(seconds: int) -> list[int]:
    """When a run of one step a second prints its lines, in seconds after its start."""
    stream, clock = io.StringIO(), Clock()
    bar = ProgressBar(seconds, shown={}, stream=stream, clock=clock)
    for step in range(1, seconds + 1):
        clock.now = 100.0 + step
        bar.log(step, step, {})
    return [int(number) for number in re.findall(r"step (\d+)/", stream.getvalue())]


def test_a_long_run_does_not_fill_a_log_file():
    moments = _moments(3 * 24 * 3600)
    assert len(moments) < 1000, "three days of training"
    assert moments[:4] == [1, 16, 31, 46]
    gaps = [b - a for a, b in itertools.pairwise(moments[:-1])]
    assert all(gap <= 600 for gap in gaps) and gaps[-1] == 600
    at_ten_hours = next(gap for moment, gap in zip(moments, gaps) if moment > 36000)
    assert 360 <= at_ten_hours <= 366, "a hundredth of the time passed"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_bar():
    stream = Terminal()
    bar = ProgressBar(4, shown=SHOWN, first_step=1, stream=stream)
    bar.log(2, 128, METRICS)
    bar.write("a table")
    bar.log(4, 256, {})
    bar.close()
    text = stream.getvalue()
    assert "2/4" in text and "4/4" in text and "score 1.25, lr 3.00e-04" in text
    assert re.search(r"(^|[\r\n])a table\n", text)
    assert text.count("\n") == 2  # the table's, and the last of the bar


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (3e-4, "3.00e-04"),
        (9.65e-6, "9.65e-06"),
        (-2.5e-7, "-2.50e-07"),
        (0.001, "0.00100"),
        (0.05, "0.0500"),
        (1.25, "1.25"),
        (-9.5, "-9.50"),
        (24.0, "24.0"),
        (99.99, "100"),
        (312.4, "312"),
        (40960.0, "40960"),
        (1.5e7, "1.50e+07"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert short(value) == text


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still until it is set, and a place of this process that began at 100."""
    clock = {"now": 100.0}
    monkeypatch.setattr("training.runtime.processes.time.monotonic", lambda: clock["now"])
    place = Place(_counted=100.0)
    monkeypatch.setattr("training.runtime.processes.place", place)
    monkeypatch.setattr("training.reporting.sinks.place", place)
    return lambda seconds: clock.update(now=seconds)


def test_seconds_of_phases_add_up_to_all_that_passed(now):
    now(103.0)
    with phase("reading data"):
        now(108.0)
        with phase("writing"):
            now(110.0)
        now(111.0)
    now(111.5)
    assert processes.place.take_seconds() == {OUTSIDE: 3.5, "reading data": 6.0, "writing": 2.0}
    now(112.0)
    assert processes.place.take_seconds() == {OUTSIDE: 0.5}


def test_a_process_began_before_its_imports():
    lived = time.time() - psutil.Process().create_time()
    assert lived - 1.0 < time.monotonic() - processes._began() < lived + 60.0


def test_what_passed_since_the_line_before(now):
    with phase("loading models"):
        now(110.0)
    clock = WallClock(redone=7.0)
    with phase("evaluating"):
        now(112.0)
    assert clock.take() == {"time/wall": 19.0, "time/start": 10.0, "time/redone": 7.0, "time/evaluate": 2.0}
    with phase("between phases"):
        now(115.0)
    with phase("normalising"):
        now(118.0)
        with phase("saving models"):
            now(119.0)
    assert clock.take() == {"time/wall": 7.0, "time/normalize": 3.0, "time/save": 1.0}
    assert seconds_by_part([{"time/wall": 7.0, "time/normalize": 3.0}]) == {"normalize": 3.0, "other": 4.0}


def test_the_lines_of_a_run_that_goes_on_have_the_time_of_the_steps_that_are_done_again(now, tmp_path):
    now(110.0)
    writer = MetricWriter(tmp_path, total_steps=3, report_to=())
    for step in (1, 2, 3):
        now(110.0 + step * 4)
        writer.log(step, step, {})
    writer.close()
    assert seconds_after(tmp_path / "metrics.jsonl", 1) == 8.0
    now(150.0)
    processes.place.take_seconds()  # as in a new process
    now(155.0)
    writer = MetricWriter(tmp_path, total_steps=3, report_to=(), resume_step=1)
    now(156.0)
    assert writer.take_time() == {"time/wall": 14.0, "time/start": 5.0, "time/redone": 8.0}
    writer.close()


def test_no_line_is_done_again_in_another_folder_or_from_the_beginning(tmp_path):
    assert seconds_after(tmp_path / "metrics.jsonl", 1) == 0.0
    path = write(tmp_path / "metrics.jsonl", {"step": 2, "samples": 1, "time/wall": 3.0})
    assert seconds_after(path, None) == 0.0 and seconds_after(path, 2) == 0.0


def test_phases_of_the_slowest_ranks_are_shares_of_the_steps():
    """Rank 0 generated for 3 s and trained for 5, rank 1 for 5 and 3: both steps took 8 s, of 9 s altogether."""
    rows = [{"time/generate": 5.0, "time/train": 5.0, "time/step": 8.0, "time/wall": 9.0}]
    assert seconds_by_part(rows) == {"generate": 4.0, "train": 4.0, "other": 1.0}


def test_steps_without_phases_are_training_and_rounding_is_no_part():
    rows = [{"time/step": 2.0, "time/wall": 3.0, "time/start": 1.0 - 1e-9}]
    assert seconds_by_part(rows) == {"start": 1.0 - 1e-9, "train": 2.0}
    assert seconds_by_part([{"time/a": 0.5, "time/step": 2.0, "time/checkpoint": 4.0, "time/wall": 6.0}]) == {
        "a": 0.5,
        "checkpoint": 4.0,
        "other": 1.5,
    }
    assert seconds_by_part([{"step": 0}]) == {}


def test_lines_of_time():
    assert time_lines("3 steps", {"redone": 30.0, "train": 90.0}) == [
        "3 steps, 0:02:00",
        "  steps done again            30.0 s       25.0%",
        "  train                       90.0 s       75.0%",
    ]
