"""The functions of --reward_function: names, weights, built-in ones, and columns that data lack."""

import pytest

from engine.errors import UserError
from engine.reward.built_in import Format
from tests.training.config.command_lines import parse
from tests.training.data.tiny_tokenizers import word_tokenizer
from training.config.reward import check_columns, load_functions, names, score_parts, short_names
from training.config.step3 import RLHFFlags
from training.data.examples import Prompts
from training.data.files import Unread

SOURCE = """
from engine.reward.base import RewardSource

def right(prompts, responses, answer):
    return [float(response == str(one)) for response, one in zip(responses, answer)]

def form(completions, **others):
    return [1.0] * len(completions)

def maybe(prompts, responses, answer=None):
    return [0.0] * len(responses)

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


def parts(*words):
    return [(part.name, part.weight, part.given) for part in score_parts(parse(*words, flags_class=RLHFFlags))]


def test_they_are_loaded_by_what_is_given(rules):
    right, form = f"{rules}:right", f"{rules}:form"
    found = loaded("--reward_function", right, form, "format")
    assert list(found) == [right, form, "format"] and loaded() == {}
    assert found[right](["?"] * 2, ["42", "41"], answer=[42, 42]) == [1, 0]
    assert found["format"](["?"], ["<think></think><answer></answer>"]) == [1]


def test_parts_have_the_functions_names_and_weights():
    several = ("--reward_function", "m:right", "m:form", "--reward_weights", "1", "-3")
    assert parts(*several) == [("right", 1.0, "m:right"), ("form", -3.0, "m:form")]
    beside = ("--reward_model_name_or_path", "other", "--reward_model_weight", "0.5")
    mixed = [("model", 0.5, None), ("right", 2.0, "m:right")]
    assert parts("--reward_function", "m:right", "--reward_weights", "2", *beside) == mixed


def test_what_scores_alone_is_called_function_or_model():
    assert parts("--reward_function", "m:right") == [("function", 1.0, "m:right")]
    assert parts("--reward_model_weight", "2") == [("model", 2.0, None)]


def test_a_form_of_ones_own():
    form = loaded("--reward_function", "format", "--response_format", r"\d+")["format"]
    assert isinstance(form, Format) and form([], ["42", "x"]) == [1, 0]


@pytest.mark.parametrize(
    "given, expected",
    [
        (["a.py:f", "b.py:g"], ["f", "g"]),
        (["a.py:f", "b.py:f", "c.py:f"], ["f", "f_2", "f_3"]),
        (["m:model", "m:histogram", "m:score_se"], ["model_2", "histogram_2", "score_se_2"]),
        (["math_verify", "format"], ["math_verify", "format"]),
        (["a.py:server", "a.py:f"], ["server_2", "f"]),
        (["a.py:score", "a.py:learned"], ["score", "learned_2"]),  # objective/scores_learned is dynamic sampling's
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
    full = prompts(answer=42)
    check_columns(functions, {"the prompts": full, "the held-out prompts": full})
    for lacking in (prompts(), prompts(answer=None)):
        told = r":right asks for the column answer, which the held-out prompts lack: they have prompt\."
        with pytest.raises(UserError, match=told):
            check_columns(functions, {"the prompts": full, "the held-out prompts": lacking})


def prompts(**columns) -> Prompts:
    return Prompts([{"prompt": "a", **columns}], word_tokenizer(), 4)


@pytest.mark.parametrize("name", ["right", "maybe"])
def test_a_column_that_is_not_read_is_no_missing_one(rules, name):
    functions = loaded("--reward_function", f"{rules}:{name}")
    told = rf":{name} asks the prompts for the column answer, which is not read: it holds bytes\."
    with pytest.raises(UserError, match=told):
        check_columns(functions, {"the prompts": prompts(answer=Unread("bytes"))})


def test_restart_points_know_them_without_folders():
    assert short_names(["/a/rules.py:f", "math_verify"]) == "rules.py:f math_verify"
    assert short_names([]) is None
