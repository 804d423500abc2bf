"""Which requests are decoded, and where, by hand."""

from engine.rollout.request import Request, Schedule


def requests(*lengths: int) -> list[Request]:
    return [Request(row, length, most=10) for row, length in enumerate(lengths)]


def rows(schedule: Schedule) -> list[int]:
    return [request.row for request in schedule.living]


def test_the_longest_prompts_begin():
    schedule = Schedule(requests(3, 9, 5, 7), rows=2)
    assert schedule.rows == 2 and schedule.open == 4
    assert [request.row for request in schedule.join()] == [1, 3]
    assert rows(schedule) == [1, 3] and schedule.open == 4
    assert schedule.join() == []


def test_there_are_no_more_rows_than_requests():
    assert Schedule(requests(3, 9), rows=5).rows == 2


def test_the_last_rows_take_the_places_of_those_that_ended():
    schedule = Schedule(requests(6, 5, 4, 3, 2, 1), rows=6)
    schedule.join()
    for row in (0, 2, 5):
        schedule.living[row].ended = True
    assert schedule.leave() == ([3, 4], [0, 2])
    assert rows(schedule) == [3, 1, 4] and schedule.open == 3


def test_nobody_moves_when_the_last_rows_end():
    schedule = Schedule(requests(3, 2, 1), rows=3)
    schedule.join()
    schedule.living[2].tokens = [7] * 10  # all that it may have
    assert schedule.leave() == ([], [])
    assert rows(schedule) == [0, 1]


def test_prompts_wait_until_an_eighth_of_the_rows_is_free():
    schedule = Schedule(requests(*range(1, 21)), rows=16)
    assert len(schedule.join()) == 16
    schedule.living[3].ended = True
    schedule.leave()
    assert schedule.join() == [] and schedule.open == 19
    schedule.living[0].ended = True
    schedule.leave()
    assert [request.prompt_length for request in schedule.join()] == [4, 3]
    assert len(schedule.living) == 16 and schedule.open == 18
