"""Forms of responses, by cases made by hand; right answers by math-verify: equal ones, wrong ones, none, and what
takes too long.
"""

import importlib.util
import os
import sys

import pytest
import torch

from engine.errors import RunStopped, UserError
from engine.reward.built_in import Format, MathVerify
from engine.reward.function import FunctionReward
from engine.reward.math_worker import answers_in
from scripts.harness.models import EOS, PAD, make_tokenizer
from tests.engine.fake_models import rollout_of

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


installed = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install .[math]"
)
# In the place of the package: the numbers of a text; "slow" never ends, "gone" takes the process with it.
STAND_IN = """
import os, re, time

def parse(text, parsing_timeout):
    if "slow" in text:
        while True:
            time.sleep(1)
    if "gone" in text:
        os._exit(1)
    if "noisy" in text:
        print("a library prints")
    return re.findall("[0-9]+", text)

def verify(expected, found, timeout_seconds):
    return expected[-1:] == found[-1:]
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)


def scored(pairs: list[tuple], **settings) -> list[float]:
    answers, responses = zip(*pairs)
    return MathVerify("answer", **settings)(["?"] * len(pairs), list(responses), answer=list(answers))


EQUAL = [
    ("1/2", "so it is 2/4"),
    (r"\frac{1}{2}", r"The answer is $\frac{2}{4}$."),
    ("1/2", r"\boxed{0.5}"),
    (0.5, "1/2"),
    (42, "12 + 30 = 42"),
    ("48 / 2 = 24, and 48 + 24 = 72.\n#### 72", "That makes 72 in all."),
    ("x^2+1", "$1 + x^2$"),
    ("x^2+1", "<think>by hand</think><answer>1+x^2</answer>"),
    ("-3", "<think>3? No.</think><answer>-3</answer> or 3"),
    ("1,000", "1000"),
    ("A", "<answer>A</answer>"),
]
UNEQUAL = [
    ("1/2", "so it is 1/3"),
    (42, "43"),
    (42, "42 or rather 43"),
    (42, "I do not know."),
    (42, ""),
    (42, "<answer>41</answer><answer>43</answer> 42"),
    (42, "<answer><answer>41</answer></answer> 42"),
    ("A", "<answer>B</answer>"),
    ("x^2+1", "$x^2 - 1$"),
]


@installed
def test_what_is_equal_and_what_is_not():
    pairs = EQUAL + UNEQUAL
    found = scored(pairs)
    assert [pair for pair, score in zip(pairs, found) if score] == EQUAL


@installed
def test_an_answer_of_the_data_in_which_there_is_none():
    with pytest.raises(ValueError, match=r"column answer: math-verify finds no answer in '', which is in the data"):
        scored([("", "42")])


@pytest.mark.parametrize(
    "response, expected",
    [
        ("42", ["42"]),
        ("<answer>4</answer>", ["4", "$4$"]),
        ("<answer>3</answer> <answer>\n4 </answer>", ["\n4 ", "$4$"]),
        ("<answer>3 <answer>4</answer></answer>", ["4", "$4$"]),
        ("<answer>4", ["<answer>4"]),
    ],
)
def test_the_last_tags_hold_the_answer(response, expected):
    assert answers_in(response) == expected


@pytest.mark.slow
def test_what_never_ends_is_ended_and_counts_as_wrong(stand_in):
    pairs = [("1", "1"), ("2", "slow 2"), ("3", "3"), ("4", "gone 4"), ("5", "noisy 5")]
    assert scored(pairs, seconds=3.0) == [1, 0, 1, 0, 1]


@pytest.mark.parametrize("answer", [None, True, ["1"]])
def test_an_answer_that_is_none(stand_in, answer):
    with pytest.raises(ValueError, match="column answer: found .*; needed a text or a number"):
        scored([(answer, "1")])


def test_columns_reach_it_by_the_prompts_indices_and_a_missing_one_stops_the_run(stand_in):
    tokenizer = make_tokenizer()
    rollout = rollout_of([[5], [6], [7]], [[20, EOS], [21, 22], [23, EOS]], PAD)
    rows = [{"prompt": "a", "gold": "w20"}, {"prompt": "b", "gold": 21}, {"prompt": "c", "gold": 23}]
    reward = FunctionReward(MathVerify("gold"), tokenizer, rows, "math_verify")
    assert reward.score(rollout).tolist() == [1, 0, 1]  # of the second, w22 is last
    assert reward.score(rollout.select(torch.tensor([2, 0]))).tolist() == [1, 1]
    del rows[1]["gold"]
    with pytest.raises(RunStopped, match="function math_verify needs the column gold, but a row has prompt: "):
        reward.score(rollout)


def test_where_the_package_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = r"--reward_function math_verify: the package math-verify is not installed in .*pip install \.\[math\]"
    with pytest.raises(UserError, match=told):
        MathVerify("answer")


def test_a_package_that_cannot_be_imported(stand_in, tmp_path):
    (tmp_path / "math_verify.py").write_text("import a_library_that_is_gone\n")
    with pytest.raises(
        RuntimeError, match="importing math_verify raised ModuleNotFoundError: .*a_library_that_is_gone"
    ):
        scored([("1", "1")])


def test_the_process_ends_with_its_owner(stand_in):
    reward = MathVerify("answer")
    assert reward(["?"], ["1"], answer=["1"]) == [1]
    process = reward._worker._process
    process.stdin.close()
    assert process.wait(60) == 0
    assert os.getsid(0) != process.pid
