"""Where steps end, in the ids of responses."""

import pytest

from engine.errors import UserError
from engine.reward.steps import StepEnds
from scripts.harness.models import EOS, make_tokenizer
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
