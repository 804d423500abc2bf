"""The command of an installation: it names every program, and runs each as the program's own module does."""

import runpy
import sys
from importlib.util import find_spec

import pytest

from training import commands


@pytest.fixture
def called(monkeypatch):
    """A function that runs the command with these words."""

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["/env/bin/four-engine-rlhf", *words])
        return commands.main()

    return run


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_each_runs_its_module_with_the_flags(command, called, monkeypatch):
    started = []
    monkeypatch.setattr(runpy, "run_module", lambda module, **how: started.append((module, sys.argv[1:], how)))
    called(command, "--seed", "1")
    module = commands.COMMANDS[command][0]
    assert started == [(module, ["--seed", "1"], {"run_name": "__main__", "alter_sys": True})]
    found = find_spec(module)
    assert found.submodule_search_locations is None or find_spec(f"{module}.__main__")


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_help_lists_them(words, called, capsys):
    assert called(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if " training." in line and "deepspeed" not in line] == [
        [name, module] for name, (module, _) in commands.COMMANDS.items()
    ]
    assert "deepspeed --num_gpus 8 --module training.step3_rlhf [flags]" in lines


def test_a_misspelt_one_is_told(called, capsys):
    assert called("comprae") == 2
    assert capsys.readouterr().err == "error: unknown command comprae. Did you mean compare?\n"
