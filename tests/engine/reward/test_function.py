"""A function's scores: which arguments it is given, what may come back, and how its failures are told."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from engine.errors import RunStopped
from engine.reward.base import decoded
from engine.reward.function import FunctionReward, Signature
from scripts.harness.models import BOS, EOS, PAD, make_tokenizer
from tests.engine.fake_models import rollout_of

TOKENIZER = make_tokenizer()
ROLLOUT = rollout_of([[BOS, 5], [6, 7, 8], [9]], [[20, EOS], [EOS], [21, 22, 23]], PAD, width=5, prompt_width=4)


def score(function, **kwargs) -> torch.Tensor:
    return FunctionReward(function, TOKENIZER, **kwargs).score(ROLLOUT)


def returning(value):
    return lambda prompts, responses: value


def test_the_texts_are_the_real_tokens_without_special_ones():
    prompts, responses = decoded(ROLLOUT, TOKENIZER)
    assert prompts == ["w05", "w06 w07 w08", "w09"]
    assert responses == [" w20", "", " w21 w22 w23"]


def test_the_function_is_given_the_texts():
    given = []
    assert score(lambda prompts, responses: given.append((prompts, responses)) or [1, 2, 3]).tolist() == [1, 2, 3]
    assert given == [(["w05", "w06 w07 w08", "w09"], [" w20", "", " w21 w22 w23"])]


def test_rows_are_found_by_the_prompts_indices():
    rows = [{"answer": f"w2{number}"} for number in range(10)]
    rollout = ROLLOUT.select(torch.tensor([2, 0]))  # their indices go with them: 2 and 0
    reward = FunctionReward(lambda prompts, responses, rows: [int(row["answer"][1:]) for row in rows], TOKENIZER, rows)
    assert reward.score(rollout).tolist() == [22, 20]
    with pytest.raises(AssertionError, match="needs rows of the data"):
        FunctionReward(lambda prompts, responses, rows: [], TOKENIZER)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2.5, -3],
        (True, 2.5, -3),
        np.array([1, 2.5, -3]),
        torch.tensor([1, 2.5, -3], requires_grad=True),
        [torch.tensor(1.0, requires_grad=True), np.float32(2.5), Fraction(-3)],
    ],
)
def test_numbers_of_any_kind(returned):
    scores = score(returning(returned))
    assert scores.tolist() == [1, 2.5, -3]
    assert scores.dtype == torch.float32 and not scores.requires_grad and scores.device == ROLLOUT.sequences.device


def test_nan_and_infinity_are_passed_on():
    scores = score(returning([math.nan, math.inf, 1e300])).tolist()
    assert math.isnan(scores[0]) and scores[1:] == [math.inf, math.inf]


@pytest.mark.parametrize(
    "returned, told",
    [
        (None, "returned None, which is not a sequence of numbers"),
        ("abc", "returned 'abc', which is not a sequence"),
        ({1: 2}, "returned {1: 2}, which is not a sequence"),
        (3.0, "returned 3.0, which is not a sequence"),
        (torch.tensor(3.0), r"returned tensor\(3.\), which is not a sequence"),
        ([1.0, 2.0], r"returned 2 values for 3 responses: \[1.0, 2.0\]"),
        ([1, None, 2], "returned None for response 1 of 3, which is not a number"),
        ([1, 2, "3"], "returned '3' for response 2 of 3"),
        (torch.ones(3, 1), r"returned \[1.0\] for response 0 of 3"),
        ([1, 2, 3j], "returned 3j for response 2"),
    ],
)
def test_what_is_no_score_stops_the_run(returned, told):
    with pytest.raises(RunStopped, match=f"the reward function mine:f {told}.*Correct the function\\."):
        score(returning(returned), name="mine:f")


def test_a_flood_is_cut():
    with pytest.raises(RunStopped) as stop:
        score(returning(["x" * 10_000] * 3))
    assert len(str(stop.value)) < 500


def broken(prompts, responses):
    return [looked_up(response) for response in responses]


def looked_up(response):
    return {}[response]  # the line to be named


def test_what_the_function_raises_is_told_with_its_line():
    line = looked_up.__code__.co_firstlineno + 1
    with pytest.raises(RunStopped, match=f"function broken raised KeyError: ' w20' .*{__file__}, line {line}: return "):
        score(broken)


def test_the_line_named_is_the_functions_and_not_a_librarys():
    def function(prompts, responses):
        return np.stack([])

    line = function.__code__.co_firstlineno + 1
    with pytest.raises(RunStopped, match=f"raised ValueError: .*{__file__}, line {line}: return np.stack"):
        score(function)


ROWS = [{"prompt": "a", "answer": "1", "level": 3}, {"prompt": "b", "answer": "2", "source": "s"}]
P, R = ["p", "q"], ["r", "s"]


@pytest.mark.parametrize(
    "function, positional, named",
    [
        (lambda prompts, responses: 0, [P, R], {}),
        (lambda *texts: 0, [P, R], {}),
        (lambda a, b, answer: 0, [P, R], {"answer": ["1", "2"]}),
        (lambda prompts, responses, *, answer: 0, [P, R], {"answer": ["1", "2"]}),
        (lambda prompts, responses, rows: 0, [P, R], {"rows": ROWS}),
        (lambda prompts, responses, prompt: 0, [P, R], {"prompt": ["a", "b"]}),
        (lambda prompts, responses, level=1, other=2: 0, [P, R], {"level": [3, None]}),
        (
            lambda prompts, responses, answer, **others: 0,
            [P, R],
            {"answer": ["1", "2"], "level": [3, None], "source": [None, "s"]},
        ),
        (lambda completions: 0, [], {"completions": R}),
        (lambda completions, answer: 0, [], {"completions": R, "answer": ["1", "2"]}),
        (lambda prompts, completions, rows: 0, [], {"prompts": P, "completions": R, "rows": ROWS}),
        (
            lambda completions, **others: 0,
            [],
            {"prompts": P, "completions": R, "answer": ["1", "2"], "level": [3, None], "source": [None, "s"]},
        ),
    ],
)
def test_arguments(function, positional, named):
    signature = Signature.of(function)
    found = signature.arguments(P, R, ROWS)
    assert found == (positional, named)
    assert function(*found[0], **found[1]) == 0
    assert signature.takes_rows == bool(set(named) - {"prompts", "completions"})


def test_an_object_may_say_which_columns_it_is_given():
    class Judge:
        columns = ("the answer",)

        def __call__(self, prompts, responses, **columns):
            return columns["the answer"]

    signature = Signature.of(Judge())
    rows = [{"the answer": 1, "x": 2}, {"the answer": 3}]
    assert Judge()(P, R, **signature.arguments(P, R, rows)[1]) == [1, 3]
    assert signature.missing({"the answer": None}) == ["the answer"] and signature.needs_rows


@pytest.mark.parametrize("function", [lambda prompts: 0, lambda a, b, answer, /: 0, lambda: 0])
def test_what_cannot_be_called_so(function):
    with pytest.raises(TypeError):
        Signature.of(function)


def test_a_column_that_a_row_lacks_stops_the_run():
    rollout = rollout_of([[5], [6]], [[20, EOS], [21, EOS]], PAD)
    tokenizer = make_tokenizer()
    reward = FunctionReward(lambda prompts, responses, source: [1, 1], tokenizer, ROWS, "rules.py:f")
    with pytest.raises(RunStopped, match="the reward function rules.py:f needs the column source, but a row has "):
        reward.score(rollout)
    assert FunctionReward(lambda prompts, responses, answer: answer and [1, 2], tokenizer, ROWS).score(
        rollout
    ).tolist() == [1, 2]
