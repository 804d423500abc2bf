"""Reward functions and servers by flags: names, weights, built-in ones, columns that data lack, functions that a user
names, and the mistakes that can be made.
"""

import itertools
import json
import sys

import pytest

from engine.errors import UserError, shown_command
from engine.reward.built_in import Format
from engine.reward.server import ServerSettings
from tests.training.config.command_lines import parse
from tests.training.data.tiny_tokenizers import word_tokenizer
from training.config.reward import (
    check_columns,
    is_source,
    load_function,
    load_functions,
    names,
    score_parts,
    short_names,
)
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
    null = r"prompt, answer \(null\)\. Null counts as absent\. Add"
    for lacking, having in ((prompts(), r"prompt\. Add"), (prompts(answer=None), null)):
        told = f":right asks for the column answer, which the held-out prompts lack: they have {having}"
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


NAMES = (f"reward_of_a_test_{number}" for number in itertools.count())
GOOD = "def f(prompts, responses):\n    return [len(response) for response in responses]\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the current directory; returns its name."""

    def write(source: str) -> str:
        name = next(NAMES)
        (tmp_path / f"{name}.py").write_text(source)
        return name

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return write


def test_of_a_module_in_the_current_directory(module):
    assert load_function(f"{module(GOOD)}:f")(["a"], ["bcd"]) == [3]


def test_of_a_file_and_of_what_stands_beside_it(module, tmp_path, monkeypatch):
    helper = module("LENGTH = 7\n")
    name = module(f"def f(prompts, responses, rows):\n    import {helper}\n    return [{helper}.LENGTH]\n")
    monkeypatch.chdir(tmp_path.parent)
    assert load_function(f"{tmp_path.name}/{name}.py:f")([], [], rows=[]) == [7]
    assert load_function(f"{tmp_path}/{name}.py:f")([], [], rows=[]) == [7]


@pytest.mark.parametrize(
    "name, told",
    [
        ("f", "give module:function"),
        (":f", "give module:function"),
        ("m:", "give module:function"),
        ("no_such_module_at_all:f", "there is no module no_such_module_at_all, neither installed nor in"),
        ("json.nothing:f", "there is no module json.nothing"),
        ("nowhere/reward.py:f", "there is no file nowhere/reward.py"),
        ("json:nothing", "json/__init__.py has no nothing"),
        ("json:__doc__", "which cannot be called"),
        ("torch.nn:Module", "it is a class"),
    ],
)
def test_what_cannot_be_found(module, name, told):
    with pytest.raises(UserError, match=f"--reward_function {name}: .*{told}"):
        load_function(name)


@pytest.mark.parametrize(
    "source, told",
    [
        ("\nimport missing_library\n", "raised ModuleNotFoundError: No module named 'missing_library' .*, line 2"),
        ("x = 1\n1 / 0\n", "raised ZeroDivisionError: division by zero .*, line 2"),
        ("def f(:\n", "raised SyntaxError.*, line 1"),
        ("import sys\nsys.exit(3)\n", "raised SystemExit: 3 .*, line 2"),
        ("def g():\n    raise ValueError('x' * 10000)\ng()\n", "raised ValueError: x{300} .*, line 2"),
    ],
)
def test_an_import_that_raises(module, source, told):
    name = module(source)
    with pytest.raises(UserError, match=f"importing {name} {told}"):
        load_function(f"{name}:f")


@pytest.mark.parametrize(
    "parameters, fits",
    [
        ("prompts, responses", True),
        ("a, b", True),
        ("*texts", True),
        ("prompts, responses, rows", True),
        ("prompts, responses, *, rows", True),
        ("prompts, responses, scale=2", True),
        ("prompts", False),
        ("prompts, responses, answers", True),
        ("completions, answers, level=1, **columns", True),
        ("prompts, responses, answers, /", False),
        ("prompts, responses, rows, /", False),
    ],
)
def test_parameters(module, parameters, fits):
    name = module(f"def f({parameters}):\n    return []\n")
    if fits:
        load_function(f"{name}:f")
        return
    with pytest.raises(UserError, match=f"{name}:f: it takes .*but is called with the prompts and the responses"):
        load_function(f"{name}:f")


def test_a_torch_module_whose_forward_does_not_fit_is_refused(module):
    forward = "    def forward(self, input_ids):\n        pass\n"
    name = module(f"import torch\nclass Module(torch.nn.Module):\n{forward}model = Module()\n")
    with pytest.raises(UserError, match=rf"{name}:model: it takes \(input_ids\), but is called with the prompts"):
        load_function(f"{name}:model")


@pytest.mark.parametrize("name", ["json.py", "rules.v2.py", "my-rules.py", "my rules.py", "rules", "rules.txt", "2.py"])
def test_a_file_may_have_any_name(module, tmp_path, name):
    source = f"from dataclasses import dataclass\nimport beside\n@dataclass\nclass C:\n    a: int\n{GOOD}"
    for folder in ("first", "second"):  # of one name, and not one module
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside.py").write_text("")
        (tmp_path / folder / name).write_text(source + f"f.folder = '{folder}'\nf.calls = []\n")
        function = load_function(f"{folder}/{name}:f")
        assert function.folder == folder
        assert function([], ["abc"]) == [3]
        assert load_function(f"{folder}/{name}:f") is function  # imported once
    assert json.loads("3") == 3
    (tmp_path / name).write_text(source)
    assert load_function(f"{name}:f")(["a"], ["bcd"]) == [3]


def test_a_file_given_by_a_link(module, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "beside_the_target.py").write_text("LENGTH = 7\n")
    (tmp_path / "store" / "rules_of_may.py").write_text(f"import beside_the_target\n{GOOD}")
    (tmp_path / "linked_rules.py").symlink_to("store/rules_of_may.py")
    assert load_function("linked_rules.py:f")(["a"], ["bcd"]) == [3]
    (tmp_path / "linked_folder").symlink_to("store")
    assert load_function("linked_folder/rules_of_may.py:f")(["a"], ["bcd"]) == [3]
    (tmp_path / "nowhere.py").symlink_to("gone.py")
    with pytest.raises(UserError, match="there is no file nowhere.py"):
        load_function("nowhere.py:f")


def test_a_file_that_other_processes_can_import_by_name_keeps_its_name(module, tmp_path):
    name = module(GOOD)
    assert load_function(f"{name}.py:f").__module__ == name


@pytest.mark.parametrize("source", [b"\0", b"\xff\xfe", b"1 / 0", b"import sys\nsys.exit(0)", b"f ="])
def test_a_file_of_another_name_that_cannot_be_imported(module, tmp_path, source):
    (tmp_path / "bad-rules.py").write_bytes(source)
    for _ in range(2):
        with pytest.raises(
            UserError, match="--reward_function bad-rules.py:f: importing bad-rules.py raised .*Fix the"
        ):
            load_function("bad-rules.py:f")


FUNCTION_SOURCE = """
from engine.reward.base import RewardSource

class Source(RewardSource):
    def __init__(self, {}):
        pass
"""


@pytest.mark.parametrize("parameters, fits", [("tokenizer", True), ("tokenizer, url=''", True), ("a, b", False)])
def test_a_class_of_reward_sources_is_made_of_the_tokenizer(module, parameters, fits):
    name = module(FUNCTION_SOURCE.format(parameters))
    if fits:
        assert is_source(load_function(f"{name}:Source"))
        return
    with pytest.raises(UserError, match=f"{name}:Source: it takes .*but is called with the tokenizer alone"):
        load_function(f"{name}:Source")


def test_the_score_of_a_reward_source_is_given_the_rollout_alone(module):
    name = module(FUNCTION_SOURCE.format("tokenizer") + "    def score(self, rollout, letter):\n        return []\n")
    with pytest.raises(UserError, match=r"Source.score: it takes \(self, rollout, letter\), but is called with the"):
        load_function(f"{name}:Source")


def test_a_git_lfs_pointer_is_called_one(tmp_path):
    (tmp_path / "rewards.py").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")
    told = r"--reward_function .*rewards.py:f: .*rewards.py is a Git LFS pointer: .*`git lfs pull`"
    with pytest.raises(UserError, match=told):
        load_function(f"{tmp_path}/rewards.py:f")


URL = "http://10.0.0.7:8000/score"


def parsed(*words: str) -> RLHFFlags:
    return parse("--reward_url", URL, *words, flags_class=RLHFFlags)


def test_what_is_given_and_by_default():
    args = parsed("--reward_url_columns", "answer", "--reward_url_patience", "30")
    assert args.reward_server() == ServerSettings(urls=[URL], columns=["answer"], patience=30.0)
    assert args.other_rewards == [URL]
    assert parse(flags_class=RLHFFlags).reward_server() is None


@pytest.mark.parametrize(
    "words, parts",
    [
        ((), [("server", 1.0)]),
        (("--reward_function", "format", "--reward_weights", "0.2", "3"), [("format", 0.2), ("server", 3.0)]),
        (("--reward_url", URL, "http://b/", "--reward_weights", "0.5"), [("server", 0.5)]),
    ],
)
def test_the_servers_weight_comes_after_the_functions(words, parts):
    assert [(part.name, part.weight) for part in score_parts(parsed(*words))] == parts


def test_it_stands_in_for_the_reward_model_or_beside_one():
    assert parsed().reward_paths == []
    assert parsed("--reward_model_name_or_path", "reward").reward_paths == ["reward"]


@pytest.mark.parametrize(
    "words, message",
    [
        (("--reward_url", "10.0.0.7:8000"), "--reward_url 10.0.0.7:8000: is not a URL of a server"),
        (("--reward_url", "ftp://a/"), "--reward_url ftp://a/: is not a URL of a server"),
        (("--reward_url", "http://a:99999/"), "--reward_url http://a:99999/: is not a URL of a server"),
        (("--reward_url", "http:///score"), "--reward_url http:///score: is not a URL of a server"),
        (("--reward_url", "http://me:secret@a/"), "--reward_url http://.../: holds a user's name"),
        (("--reward_url", "http://me:secret@a:port/"), "--reward_url http://.../: is not a URL"),
        (("--reward_url_batch_size", "0"), "--reward_url_batch_size 0: must be at least 1"),
        (("--reward_url_timeout", "0"), "--reward_url_timeout 0.0: must be greater than 0"),
        (("--reward_url_patience", "inf"), "--reward_url_patience inf: must be finite"),
        (("--reward_url_columns", "answer", "id"), "--reward_url_columns answer id: id is what something else"),
        (
            ("--reward_url_form", "openrlhf", "--reward_url_columns", "a", "b"),
            "--reward_url_columns a b: 2 columns, and the form openrlhf has room for 1",
        ),
        (("--reward_weights", "1", "2"), "--reward_weights 1.0 2.0: 2 weights. They belong to the reward server, in"),
        (
            ("--reward_function", "format", "--reward_weights", "1"),
            "1 weights. They belong to format, the reward server, in this order: give 2 or none.",
        ),
        (("--reward_model_weight", "2"), "--reward_model_weight 2.0: there is no reward model beside --reward_url"),
    ],
)
def test_what_cannot_work(words, message):
    with pytest.raises(UserError) as error:
        parsed(*words)
    assert message in str(error.value)


def test_a_key_in_a_url_is_neither_shown_nor_written():
    given = f"{URL}?key=SECRET"
    args = parse("--reward_url", given, "http://b/", flags_class=RLHFFlags)
    assert args.reward_server().urls == [given, "http://b/"]
    assert args.as_dict()["reward_url"] == [URL, "http://b/"]
    assert (
        shown_command(["a b", f"--reward_url={given}", "http://me:SECRET@b/"]) == f"'a b' --reward_url={URL} http://b/"
    )
    for words in (
        ("--reward_url_patience", given),
        ("--seed", "1", given),
        ("--reward_url", "h:1/p?key=SECRET"),
    ):
        with pytest.raises(UserError) as error:
            parse(*words, flags_class=RLHFFlags)
        assert "SECRET" not in str(error.value)


def test_what_says_nothing_without_a_server():
    with pytest.raises(UserError, match="--reward_url_columns answer needs --reward_url. Give that"):
        parse("--reward_url_columns", "answer", flags_class=RLHFFlags)


@pytest.mark.parametrize(
    "words, parts",
    [
        (("a/helpful",), [("model", "reward model", 1.0)]),
        (
            ("a/helpful", "b/helpful", "org/Safe-1.5", "model", "--reward_model_weight", "1", "2", "3", "-4"),
            [
                ("helpful", "reward model helpful", 1.0),
                ("helpful_2", "reward model helpful_2", 2.0),
                ("Safe_1_5", "reward model Safe_1_5", 3.0),
                ("model_2", "reward model model_2", -4.0),  # "model" is the name of a model alone
            ],
        ),
        (
            ("right", "safe", "--reward_function", "m:right", "m:other"),
            [
                ("right", "reward model right", 1.0),
                ("safe", "reward model safe", 1.0),
                ("right_2", "right_2 (m:right)", 1.0),
                ("other", "other", 1.0),
            ],
        ),
    ],
)
def test_several_reward_models_are_parts_by_their_folders_names(words, parts):
    found = score_parts(parse("--reward_model_name_or_path", *words, flags_class=RLHFFlags))
    assert [(part.name, part.what, part.weight) for part in found] == parts
