"""Where steps end, in the ids of responses, and where their numbers are put."""

import dataclasses
import math

import pytest
import torch

from engine.errors import UserError
from engine.reward.steps import ProcessRewardModel, StepEnds
from scripts.harness.models import EOS, PAD, make_tokenizer
from tests.engine.fake_models import conversation_of
from training.tools.toy.model import train_tokenizer


@pytest.fixture(scope="module")
def letters():
    """A token is a character; beside these there is a full stop with a new line, as Qwen's tokenizer has it."""
    tokenizer = train_tokenizer(["a b\n#."], characters=True)
    tokenizer.add_tokens([".\n"])
    tokenizer.add_tokens(["<step>"], special_tokens=True)
    return tokenizer


def ends(tokenizer, text: str, response: str, at_end: bool = False, ended: bool = False) -> list[int]:
    ids = tokenizer(response)["input_ids"] + [tokenizer.eos_token_id] * ended
    return StepEnds(tokenizer, text, at_end).of(ids, ended)


def test_a_step_ends_with_the_token_that_completes_the_text(letters):
    assert ends(letters, "\n", "a\nb\n") == [1, 3]
    assert ends(letters, "\n", "a.\nb.\na") == [1, 3]  # the full stop and the new line are one token
    assert ends(letters, "##", "a#b##a") == [4]
    assert ends(letters, "##", "a###") == [2]


def test_blank_steps_are_none(letters):
    assert ends(letters, "\n", "\n\na\n \nb\n") == [3, 7]
    assert ends(letters, "##", "a##  ####b##") == [2, 11]


def test_a_special_token_may_end_a_step_and_is_no_text_elsewhere(letters):
    assert ends(letters, "<step>", "a<step>b<step><step>") == [1, 3]
    assert ends(letters, "\n", "a\n<step>\n") == [1]


def test_the_end_of_a_response(letters):
    assert ends(letters, "\n", "a\nb", at_end=True, ended=True) == [1, 3]  # at EOS
    assert ends(letters, "\n", "a\nb\n", at_end=True, ended=True) == [1, 3]  # nothing is left to end
    assert ends(letters, "\n", "a\nb", at_end=True) == [1]  # it was cut
    assert ends(letters, "\n", "a\nb", ended=True) == [1]  # TRL ends each step with its separator


def test_a_text_that_no_response_has():
    words = make_tokenizer()
    assert StepEnds(words, "w09", at_end=False).of([8, 9, EOS], ended=True) == [1]
    for text in ("\n", ""):
        with pytest.raises(UserError, match="no step can end with"):
            StepEnds(words, text, at_end=False)


def test_numbers_stand_where_drawn_steps_end():
    words = make_tokenizer()
    turns = [[[20, 9], [21, 9], [22, EOS]], [[23, 9, 24]], [[9, 25], [26], [9]]]  # the second one is cut
    rollout = dataclasses.replace(
        conversation_of([[9, 5], [9], [7, 8]], turns, PAD, width=7), ended=torch.tensor([True, False, False])
    )
    log_odds = torch.arange(27.0).reshape(3, 9) / 10 - 1
    model = ProcessRewardModel(lambda *of: log_odds, StepEnds(words, "w09", at_end=True))
    found = model.score(rollout)
    expected = {(0, 1): 3, (0, 5): 7, (1, 1): 12, (2, 3): 23}  # the places of their log-odds
    assert {tuple(place) for place in found.nonzero().tolist()} == set(expected)
    for place, number in expected.items():
        assert found[place].item() == pytest.approx(1 / (1 + math.exp(1 - number / 10)))
