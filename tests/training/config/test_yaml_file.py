"""YAML files of flags: what they say, what the command line overrides, and which mistakes are named."""

import pytest

from tests.training.config.command_lines import Flags, parse, refusal
from training.config.parsing import parse_flags


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


def test_a_yaml_file_says_what_flags_say(config):
    path = config(
        "size: 7\nrate: 1e-3\nquick: true\nchecked: false\ncolor: blue\nstop: [a b, END]\ncenter:\n"
        "output_dir: elsewhere\n"
    )
    args = parse_flags(Flags, ["--config", path], "a program")
    assert args == Flags(
        config=path,
        output_dir="elsewhere",
        size=7,
        rate=1e-3,
        quick=True,
        checked=False,
        color="blue",
        stop=["a b", "END"],
    )


def test_the_command_line_wins_over_the_file(config):
    path = config("size: 7\nquick: true\nstop: [a]\n")
    args = parse("--config", path, "--quick", "false", "--stop", "b", "c")
    assert (args.size, args.quick, args.stop) == (3, False, ["b", "c"])


@pytest.mark.parametrize(
    "text, told",
    [
        ("sise: 3", "run.yaml: unknown key sise. Did you mean size?"),
        ("zzzzzz: 3", "run.yaml: unknown key zzzzzz. --help lists the flags."),
        ("3: 3", "run.yaml: unknown key 3."),
        ("config: x", "run.yaml: unknown key config."),
        ("local_rank: 3", "run.yaml: unknown key local_rank."),
        ("size: many", "run.yaml, key size: argument --size: invalid int value: 'many'"),
        ("size: [3, 4]", "run.yaml, key size: [3, 4] is more than one value."),
        ("size: {a: 1}", "run.yaml, key size: {'a': 1} is no text, number, truth value or list of these."),
        ("stop: [a, null]", "run.yaml, key stop: ['a', None] is no text"),
        ("stop: [a, --quick]", "run.yaml, key stop: a value that begins with -- cannot stand in a list."),
        ("color: green", "run.yaml, key color: argument --color: invalid choice: 'green'"),
        ("size: 3\nsize: 4", "run.yaml, line 2: no valid YAML (the key size stands there twice)."),
        ("size: [3", "run.yaml, line 1: no valid YAML"),
        ("just words", "run.yaml: found 'just words'; needed lines like"),
        ("", "run.yaml: found nothing; needed lines like"),
    ],
)
def test_mistakes_in_the_file(config, text, told):
    assert told in refusal("--config", config(text))


def test_a_file_that_cannot_be_read(tmp_path):
    assert refusal("--config", str(tmp_path / "none.yaml")).endswith("cannot be read (No such file or directory).")
    (tmp_path / "bad.yaml").write_bytes(b"size: \xff")
    assert "bad.yaml: cannot be read" in refusal("--config", str(tmp_path / "bad.yaml"))
