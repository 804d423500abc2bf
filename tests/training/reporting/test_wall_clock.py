"""The time that is told is the time that passed, whatever it went into."""

import time

import psutil
import pytest

from tests.training.reporting.metric_rows import write
from training.reporting.sinks import MetricWriter, WallClock, seconds_after
from training.reporting.summary import seconds_by_part, time_lines
from training.runtime import processes
from training.runtime.processes import OUTSIDE, Place, phase


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still until it is set, and a place of this process that began at 100."""
    clock = {"now": 100.0}
    monkeypatch.setattr("training.runtime.processes.time.monotonic", lambda: clock["now"])
    place = Place(_counted=100.0)
    monkeypatch.setattr("training.runtime.processes.place", place)
    monkeypatch.setattr("training.reporting.summary.place", place)
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
    writer = MetricWriter(tmp_path, total_steps=3, tensorboard=False)
    for step in (1, 2, 3):
        now(110.0 + step * 4)
        writer.log(step, step, {})
    writer.close()
    assert seconds_after(tmp_path / "metrics.jsonl", 1) == 8.0
    now(150.0)
    processes.place.take_seconds()  # as in a new process
    now(155.0)
    writer = MetricWriter(tmp_path, total_steps=3, tensorboard=False, resume_step=1)
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
