"""Functions that a user names, and the mistakes that can be made."""

import itertools
import json
import sys

import pytest

from engine.errors import UserError
from training.config.reward import is_source, load_function

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


def test_a_file_with_a_dot_that_is_given_like_a_module_is_told_how_to_be_given(module, tmp_path):
    (tmp_path / "my.rules.py").write_text(GOOD)
    with pytest.raises(UserError, match=r"there is no module my\.rules, .*\. For the file give my\.rules\.py:f\.$"):
        load_function("my.rules:f")


def test_a_file_that_other_processes_can_import_by_name_keeps_its_name(module, tmp_path):
    name = module(GOOD)
    assert load_function(f"{name}.py:f").__module__ == name


@pytest.mark.parametrize("source", [b"\0", b"\xff\xfe", b"1 / 0", b"import sys\nsys.exit(0)", b"f ="])
def test_a_file_of_another_name_that_cannot_be_imported(module, tmp_path, source):
    (tmp_path / "bad-rules.py").write_bytes(source)
    for _ in range(2):
        with pytest.raises(
            UserError, match="--reward_function bad-rules.py:f: importing bad-rules.py raised .*Mend the"
        ):
            load_function("bad-rules.py:f")


SOURCE = """
from engine.reward.base import RewardSource

class Source(RewardSource):
    def __init__(self, {}):
        pass
"""


@pytest.mark.parametrize("parameters, fits", [("tokenizer", True), ("tokenizer, url=''", True), ("a, b", False)])
def test_a_class_of_reward_sources_is_made_of_the_tokenizer(module, parameters, fits):
    name = module(SOURCE.format(parameters))
    if fits:
        assert is_source(load_function(f"{name}:Source"))
        return
    with pytest.raises(UserError, match=f"{name}:Source: it takes .*but is called with the tokenizer alone"):
        load_function(f"{name}:Source")


def test_a_git_lfs_pointer_is_called_one(tmp_path):
    (tmp_path / "rewards.py").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")
    told = r"--reward_function .*rewards.py:f: .*rewards.py is a Git LFS pointer: .*`git lfs pull`"
    with pytest.raises(UserError, match=told):
        load_function(f"{tmp_path}/rewards.py:f")
