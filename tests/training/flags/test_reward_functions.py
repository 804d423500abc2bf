"""The functions of --reward_function: names, weights, built-in ones, and columns that data lack."""

import pytest

from engine.errors import UserError
from engine.reward.formats import Format
from tests.training.flags.command_lines import parse
from training.flags.reward_functions import check_columns, load_functions, names, short_names
from training.flags.rlhf_arguments import RLHFFlags

SOURCE = """
from engine.reward.base import RewardSource

def right(prompts, responses, answer):
    return [float(response == str(one)) for response, one in zip(responses, answer)]

def form(completions, **others):
    return [1.0] * len(completions)

class Source(RewardSource):
    def __init__(self, tokenizer):
        pass
"""


@pytest.fixture
def rules(tmp_path):
    (tmp_path / "rules.py").write_text(SOURCE)
    return f"{tmp_path}/rules.py"


def loaded(*words):
    return load_functions(parse(*words, flags_class=RLHFFlags))


def test_several_with_their_weights(rules):
    found = loaded(
        "--reward_function", f"{rules}:right", f"{rules}:form", "format", "--reward_weights", "1", "0.2", "-3"
    )
    assert [(each.name, each.weight) for each in found] == [("right", 1.0), ("form", 0.2), ("format", -3.0)]
    assert found[0].function(["?"] * 2, ["42", "41"], answer=[42, 42]) == [1, 0]
    assert found[2].function(["?"], ["<think></think><answer></answer>"]) == [1]


def test_one_is_called_function_and_weighs_1(rules):
    (only,) = loaded("--reward_function", f"{rules}:right")
    assert (only.name, only.given, only.weight) == ("function", f"{rules}:right", 1.0)
    assert loaded() == []


def test_a_form_of_ones_own():
    (only,) = loaded("--reward_function", "format", "--response_format", r"\d+")
    assert isinstance(only.function, Format) and only.function([], ["42", "x"]) == [1, 0]


@pytest.mark.parametrize(
    "given, expected",
    [
        (["a.py:f", "b.py:g"], ["f", "g"]),
        (["a.py:f", "b.py:f", "c.py:f"], ["f", "f_2", "f_3"]),
        (["m:model", "m:histogram", "m:score_se"], ["model_2", "histogram_2", "score_se_2"]),
        (["math_verify", "format"], ["math_verify", "format"]),
        (["a.py:server", "a.py:f"], ["server_2", "f"]),
    ],
)
def test_names_in_metrics(given, expected):
    assert names(given) == expected


def test_a_name_without_a_module_that_is_not_built_in():
    told = "--reward_function math_verfy: give module:function or path/to/file.py:function, or a built-in one: "
    with pytest.raises(UserError, match=told + "format or math_verify"):
        loaded("--reward_function", "math_verfy")


def test_a_class_is_not_called_early(rules):
    with pytest.raises(UserError, match="--overlap_rewards with --reward_function .*:Source: that is a class"):
        loaded("--reward_function", f"{rules}:form", f"{rules}:Source", "--overlap_rewards")


def test_a_column_that_the_data_lack(rules):
    functions = loaded("--reward_function", f"{rules}:right", f"{rules}:form", f"{rules}:Source")
    full = {"prompt": "?", "answer": 42}
    check_columns(functions, {"the prompts": full, "the held-out prompts": full})
    for rest in ({}, {"answer": None}):
        told = r":right asks for the column answer, which the held-out prompts lack: they have prompt"
        with pytest.raises(UserError, match=told):
            check_columns(functions, {"the prompts": full, "the held-out prompts": {"prompt": "?"} | rest})


def test_restart_points_know_them_without_folders():
    assert short_names(["/a/rules.py:f", "math_verify"]) == "rules.py:f math_verify"
    assert short_names([]) is None
