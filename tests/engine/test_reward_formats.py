"""Forms of responses, by cases made by hand."""

import pytest

from engine.reward.built_in import Format

THOUGHT = "<think>12 and 30</think>"


@pytest.mark.parametrize(
    "response, expected",
    [
        (f"{THOUGHT}<answer>42</answer>", 1),
        (f"\n{THOUGHT}\n\n<answer>\n42\n</answer>\n", 1),
        ("<think>1 < 2,\nso <b>yes</b></think><answer></answer>", 1),
        ("42", 0),
        ("", 0),
        (f"{THOUGHT}42", 0),
        ("<answer>42</answer>", 0),
        (f"<answer>42</answer>{THOUGHT}", 0),
        (f"Well: {THOUGHT}<answer>42</answer>", 0),
        (f"{THOUGHT}<answer>42</answer> I hope.", 0),
        (f"{THOUGHT}so<answer>42</answer>", 0),
        (f"{THOUGHT}<answer>42", 0),  # cut at its length
        (f"{THOUGHT}{THOUGHT}<answer>42</answer>", 0),
        (f"{THOUGHT}<answer>41</answer><answer>42</answer>", 0),
        (f"<think>{THOUGHT}</think><answer>42</answer>", 0),
        (f"{THOUGHT}<answer><answer>42</answer></answer>", 0),
        ("<think>is it <answer>41</answer>?</think><answer>42</answer>", 0),
        ("<THINK>12</THINK><answer>42</answer>", 0),
    ],
)
def test_reasoning_and_an_answer_in_tags(response, expected):
    assert Format()(["a question"], [response]) == [expected]


def test_a_form_of_ones_own_has_to_match_the_whole_response():
    form = Format(r" ?\d+|none.")
    assert form(["p"] * 6, ["42", " 42", "42 ", "x42", "none\n", ""]) == [1, 1, 0, 0, 1, 0]
