"""Functions that a user names, and the mistakes that can be made."""

import itertools
import sys

import pytest

from engine.errors import UserError
from training.flags.user_function import is_source, load_function

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
        ("prompts, responses, answers", False),
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


def test_a_file_whose_name_is_another_modules(module, tmp_path):
    (tmp_path / "json.py").write_text(GOOD)
    with pytest.raises(UserError, match="the name json belongs to another module, .*json/__init__.py. Rename the file"):
        load_function("json.py:f")


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
