"""Which arguments a reward function is given: by its parameters, as ours and as TRL's."""

import pytest

from engine.errors import RunStopped
from engine.reward.function import FunctionReward, Signature
from scripts.harness.models import EOS, PAD, make_tokenizer
from tests.engine.fake_models import rollout_of

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
    with pytest.raises(RunStopped, match="the reward function rules.py:f asks for the column source, and a row has "):
        reward.score(rollout)
    assert FunctionReward(lambda prompts, responses, answer: answer and [1, 2], tokenizer, ROWS).score(
        rollout
    ).tolist() == [1, 2]
