"""What a run says of its steps, evaluations and restart points before it starts."""

import pytest

from training.checkpoints.files import Schedule
from training.runtime.first_lines import RunSchedule


def lines(count: int, epochs: float = 1.0, evaluates=None, **schedule) -> list[str]:
    return RunSchedule(count, epochs, Schedule(**schedule), evaluates).lines()


def test_steps_evaluations_and_points_are_counted():
    told = lines(59, 0.9904, lambda step: step % 20 == 0 or step == 59, steps=10)
    # Before the first step, after 20, 40 and 59; points after 10, 20, 30, 40 and 50.
    assert told == ["the run: 59 steps, 0.99 epochs; 4 evaluations; 5 restart points before the end, every 10 steps"]


def test_a_point_of_the_last_step_is_none_before_the_end():
    assert RunSchedule(40, 2, Schedule(steps=20)).points == 1
    assert RunSchedule(40, 2, Schedule(steps=40)).points == 0
    assert RunSchedule(41, 2, Schedule(steps=20)).points == 2


def test_points_that_are_asked_for_and_never_come_are_warned_of():
    _, warning = lines(59, steps=100)
    assert warning == (
        "warning: no restart point before the last step (--save_steps 100, and the run has 59): a run that dies begins "
        "anew. Give --save_steps 14, or --save_minutes."
    )
    assert RunSchedule(59, 1, Schedule(steps=14)).points == 4


def test_a_run_without_points_says_so_in_its_line():
    (line,) = lines(59)
    assert line.endswith("; no restart points: a run that dies begins anew (--save_steps, --save_minutes)")


@pytest.mark.parametrize(
    "schedule, said",
    [
        ({"minutes": 30.0}, "a restart point every 30 minutes"),
        ({"keep": 1, "keep_best": True}, "one wherever an evaluation finds a better score"),
        ({"steps": 9, "minutes": 0.5}, "1 restart point before the end, every 9 steps and a restart point every 0.5"),
    ],
)
def test_points_by_the_clock_or_by_scores_are_told(schedule, said):
    (line,) = lines(10, 1, **schedule)
    assert said in line


def test_one_is_not_a_number_of_many():
    told = lines(1, 1, lambda step: step == 1, steps=1)
    assert told[0] == "the run: 1 step, 1 epoch; 2 evaluations; no restart points before the end, every step"
    assert told[1].endswith("Give --save_minutes.")
    assert "no evaluations" in lines(3)[0]
