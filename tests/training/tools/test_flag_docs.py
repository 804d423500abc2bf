"""The pages of flags and of dialects' fields: written from the code, and complete."""

import dataclasses
import re
from pathlib import Path

import pytest

from engine.algorithms import Dialect
from training.config.parsing import FIRST
from training.tools import flag_docs

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "flags.md"


@pytest.mark.parametrize("file", flag_docs.pages())
def test_the_page_is_what_the_code_makes(file):
    assert (DOCS / file).read_text() == flag_docs.pages()[file], "run: python -m training.tools.flag_docs"


def of(cell: str) -> list[str]:
    """The programs that a row's second cell names; plan takes what ppo takes."""
    names = cell.replace("steps", "sft, reward, ppo").replace("tools", "merge, compare, audit").split(", ")
    return [*names, "plan"] if "ppo" in names else names


@pytest.mark.parametrize("program", flag_docs.PROGRAMS)
def test_every_flag_of_a_program_has_a_row(program):
    rows = re.findall(r"^\| `--(\w+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    found = [name for name, cell in rows if program in of(cell)]
    twice = ["output_dir", "data_path"] * (program == "plan")  # ppo's, and what they are in a plan
    assert sorted(found) == sorted([*(spec.name for spec in dataclasses.fields(flag_docs.PROGRAMS[program])), *twice])


def test_the_page_begins_with_fifty_flags_that_steps_have():
    first = PAGE.read_text().partition("## All others")[0]
    names = re.findall(r"^\| `--(\w+)` \|", first, re.MULTILINE)
    assert list(dict.fromkeys(names)) == [name for names in FIRST.values() for name in names]
    assert len(set(names)) == 50


def test_every_field_of_the_dialect_has_one_row():
    found = re.findall(r"^\| `(\w+)` \|", flag_docs.dialect_tables(), re.MULTILINE)
    assert found == [spec.name for spec in dataclasses.fields(Dialect)][1:]


@pytest.mark.parametrize("file", flag_docs.pages())
def test_tables_are_whole(file):
    """Each row has as many cells as its table's head: an unescaped | in a help text would add one."""
    columns = None
    for line in (DOCS / file).read_text().splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1 if line.startswith("|") else None
        if cells is not None and columns is not None:
            assert cells == columns, line
        columns = cells


def test_some_rows_as_they_should_read():
    page = "".join(flag_docs.pages().values())
    for row in (
        "| `--output_dir` | steps, tools | text | required | folder for models, metrics",
        "| `--seed` | steps, tools | integer ≥ 0, ≤ 2147483647 | `1234` | seed of data order,",
        "| `--data_path` | steps, compare, audit | text, one or more | required |",
        "| `--data_path` | merge | text, one or more | |",
        "| `--enable_tensorboard` | steps, tools | switch | `true` |",
        "| `--kl_coef` | ppo | number ≥ 0 | the dialect's (`0.1`) | coefficient of the KL penalty |",
        "| `--dtype` | steps, tools, serve | `fp32`, `fp16`, `bf16` | |",
        "| `--max_steps` | sft, reward | integer ≥ 1 | |",
        "| `--inference_tp_size` | ppo | integer ≥ 1 | |",
        "| `--actor_learning_rate` | ppo | number ≥ 0 | the dialect's (`1e-05`) | peak learning rate of the actor |",
        "| `--gpu` | plan | text | `a100-80g` |",
        "| `actor_lr` | number ≥ 0 | `1e-05` | `--actor_learning_rate` |",
        "| `betas` | number ≥ 0, < 1, two | `(0.9, 0.95)` | Adam's betas |",
    ):
        assert f"\n{row}" in page, row
