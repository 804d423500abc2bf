"""A function's scores: which arguments it is given, what may come back, and how its failures are told."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.errors import RunStopped
from engine.reward.base import CombinedReward, decoded
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


class Module(torch.nn.Module):
    def forward(self, prompts, responses, level=1):
        return 0


def test_a_torch_module_is_called_with_what_its_forward_takes():
    test_arguments(Module(), [P, R], {"level": [3, None]})

    class Called(Module):
        def __call__(self, prompts, responses, answer):
            return 0

    test_arguments(Called(), [P, R], {"answer": ["1", "2"]})


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


BYTES = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(
        models.BPE({byte: place for place, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
)
BYTES.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES.backend_tokenizer.decoder = decoders.ByteLevel()


# A token is a byte. " \u00e9\u65e5b" has 1, 2, 3 and 1 bytes: the characters' last tokens are 0, 2, 5 and 6.
def test_the_end_of_a_step_is_at_the_token_that_completes_its_last_character():
    text = " \u00e9\u65e5b"
    ids = BYTES(text)["input_ids"]
    assert len(ids) == 7
    rollout = rollout_of([BYTES("what")["input_ids"]], [ids], PAD, width=9)
    found = {end: FunctionReward(returning([[(end, 1.5)]]), BYTES).score(rollout)[0] for end in range(5)}
    assert {end: row.nonzero().flatten().tolist() for end, row in found.items()} == {
        0: [0],
        1: [0],
        2: [2],
        3: [5],
        4: [6],
    }
    assert found[3][5] == 1.5


def test_bytes_of_the_next_character_do_not_hide_the_end_of_a_step():
    """As Llama 2 writes what its vocabulary lacks: the two bytes of \u00e9, and a new line, one token each."""
    vocabulary = {"?": 0, "a": 1, "<0x0A>": 2, "<0xC3>": 3, "<0xA9>": 4}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "?")))
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    rollout = rollout_of([[1]], [[1, 2, 3, 4, 3, 4]], PAD)
    assert decoded(rollout, tokenizer)[1] == ["a\n\u00e9\u00e9"]
    steps = [[(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]]
    assert FunctionReward(returning(steps), tokenizer).score(rollout).tolist() == [[1.0, 2.0, 0.0, 3.0, 0.0, 4.0]]


def test_steps_within_a_word_and_behind_a_cut():
    """ " w20" is one token, and EOS is no character; two steps that end in one token are added up."""
    rollout = rollout_of([[BOS, 5], [6]], [[20, 21, EOS], [22, EOS]], PAD, prompt_width=4, width=5)
    steps = [[(2, 1.0), (np.int64(4), torch.tensor(0.5)), (5, 2)], [[4, -1.0]]]
    found = FunctionReward(returning(steps), TOKENIZER).score(rollout)
    assert found.tolist() == [[1.5, 2.0, 0, 0, 0], [-1.0, 0, 0, 0, 0]]
    function = FunctionReward(returning(steps), TOKENIZER)
    function.begin(rollout)  # as --overlap_rewards does
    assert torch.equal(function.score(rollout), found)
    pieces = CombinedReward({"f": (FunctionReward(lambda p, r: [[(len(e), 1.0)] for e in r], TOKENIZER), 2.0)})
    parts = pieces.measured(rollout, [torch.tensor([1]), torch.tensor([0])])  # the piece of row 1 is narrower
    assert parts["scores_f"].tolist() == [[0, 1.0, 0, 0, 0], [1.0, 0, 0, 0, 0]]
    assert pieces.score(rollout).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "steps, told",
    [
        (
            [(2, 0.0), (5, 1.0)],
            r"returned the step \(5, 1.0\), which ends outside of the response's 4 characters, "
            "for the response ' w20' to 'w05'",
        ),
        ([(-1, 1.0)], r"returned the step \(-1, 1.0\), which ends outside"),
        ([(3, 1.0), (2, 1.0)], r"returned the step \(2, 1.0\), which comes after a step that ends at 3, for the resp"),
        ([(2.5, 1.0)], r"returned \[\(2.5, 1.0\)\] for response 0 of 3, which is neither a number nor a list of \(end"),
        ([1.0, 2.0], r"returned \[1.0, 2.0\] for response 0 of 3, which is neither a number nor a list of \(end"),
    ],
)
def test_steps_that_are_none_stop_the_run(steps, told):
    with pytest.raises(RunStopped, match=f"the reward function mine:f {told}.*Correct the function\\."):
        score(returning([steps, [], []]), name="mine:f")


def test_a_function_that_mixes_numbers_and_steps_stops_the_run():
    with pytest.raises(RunStopped, match="mine:f returned one number for some responses, and numbers of steps"):
        score(returning([1.0, [], []]), name="mine:f")
