"""Progress: one bar in a terminal, few lines in a log file, numbers that can be read."""

import io
import itertools
import re

import pytest

from training.reporting.sinks import ProgressBar, short

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
