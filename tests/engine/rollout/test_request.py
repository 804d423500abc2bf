"""What the host sees of a response, where it ends, and which requests are decoded where, by hand."""

from types import SimpleNamespace

import pytest

from engine.rollout.request import Ends, Request, Schedule

LETTERS = SimpleNamespace(decode=lambda tokens: "".join("abcdefghij"[token] for token in tokens))


@pytest.mark.parametrize(
    "response, start, end",
    [
        ([0, 1, 2], 0, None),
        ([0, 9, 2], 0, 2),
        ([9, 1, 9], 0, 1),
        ([9, 1, 9], 1, 3),  # the first was looked at before
        ([0, 2, 3], 0, 3),  # "acd" holds "cd"
        ([2, 3, 9], 0, 2),  # the string comes before the token
        ([2, 9, 3], 0, 2),  # and here behind it
        ([2, 3, 2, 3], 0, 2),
        ([0, 2, 3], 2, 3),  # a string may begin before what is new
        ([], 0, None),
    ],
)
def test_the_first_end(response, start, end):
    assert Ends(LETTERS, tokens=(9,), strings=("cd", "xyz")).first(response, start) == end


def test_nothing_ends_a_response_without_ends():
    assert Ends(LETTERS).first([9, 2, 3]) is None


def test_tokens_behind_an_end_are_not_taken():
    request, ends = Request(row=0, prompt_length=5, most=10), Ends(LETTERS, tokens=(9,))
    request.drawn = 1
    assert request.read == 5  # the prompt; the token that was drawn is read with the next pass
    request.drawn = 4
    request.look([1, 2, 3, 4], ends)
    assert (request.tokens, request.ended, request.finished, request.read) == ([1, 2, 3, 4], False, False, 8)
    request.drawn = 8
    request.look([5, 9, 6, 9], ends)
    assert (request.tokens, request.ended, request.finished) == ([1, 2, 3, 4, 5, 9], True, True)


def test_tokens_stay_those_that_were_drawn():
    """A tokenizer would write "bc" as one token: the policy drew two, and learns their log-probs."""
    merging = SimpleNamespace(decode=LETTERS.decode, encode=lambda text, **options: [8] if text == "bc" else [])
    request = Request(row=0, prompt_length=5, most=2)
    request.look([1, 2], Ends(merging, tokens=(9,), strings=("xyz",)))
    assert request.tokens == [1, 2] and request.finished


def test_an_end_behind_the_last_token_is_none():
    request = Request(row=0, prompt_length=5, most=3)
    request.look([1, 2, 3, 9], Ends(LETTERS, tokens=(9,)))
    assert (request.tokens, request.ended, request.finished) == ([1, 2, 3], False, True)


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
