"""What the host sees of a response, and where it ends, by hand."""

from types import SimpleNamespace

import pytest

from engine.rollout.request import Ends, Request

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
