"""The page of flags: written from the code, and complete."""

import dataclasses
import re
from pathlib import Path

import pytest

from engine.algorithms import Dialect
from training.config.parsing import FIRST
from training.tools import flag_docs

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"


def test_the_page_is_what_the_code_makes():
    assert PAGE.read_text() == flag_docs.document(), "run: python -m training.tools.flag_docs > docs/flags.md"


def of(cell: str) -> list[str]:
    """The programs that a row's second cell names; plan takes what ppo takes."""
    names = cell.replace("steps", "sft, reward, ppo").split(", ")
    return [*names, "plan"] if "ppo" in names else names


@pytest.mark.parametrize("program", flag_docs.PROGRAMS)
def test_every_flag_of_a_program_has_a_row(program):
    flags = PAGE.read_text().partition("## Fields of a dialect")[0]
    found = [
        name for name, cell in re.findall(r"^\| `--(\w+)` \| ([^|]+) \|", flags, re.MULTILINE) if program in of(cell)
    ]
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


def test_tables_are_whole():
    """Each row has as many cells as its table's head: an unescaped | in a help text would add one."""
    columns = None
    for line in PAGE.read_text().splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1 if line.startswith("|") else None
        if cells is not None and columns is not None:
            assert cells == columns, line
        columns = cells


def test_some_rows_as_they_should_read():
    page = PAGE.read_text()
    for row in (
        "| `--output_dir` | steps, merge, compare, audit | text | required | folder for models, metrics",
        "| `--seed` | steps, merge, compare, audit | integer ≥ 0, ≤ 2147483647 | `1234` | seed of data order,",
        "| `--data_path` | steps, compare, audit | text, one or more | required |",
        "| `--data_path` | merge | text, one or more | |",
        "| `--enable_tensorboard` | steps, merge, compare, audit | switch | `true` |",
        "| `--kl_coef` | ppo | number ≥ 0 | the dialect's (`0.1`) | coefficient of the KL penalty |",
        "| `--dtype` | steps, merge, compare, audit, serve | `fp32`, `fp16`, `bf16` | |",
        "| `--max_steps` | sft, reward | integer ≥ 1 | |",
        "| `--inference_tp_size` | ppo | integer ≥ 1 | |",
        "| `--actor_learning_rate` | ppo | number ≥ 0 | the dialect's (`1e-05`) | peak learning rate of the actor |",
        "| `--gpu` | plan | text | `a100-80g` |",
        "| `actor_lr` | number ≥ 0 | `1e-05` | `--actor_learning_rate` | |",
        "| `betas` | number ≥ 0, < 1, two | `(0.9, 0.95)` | | Adam's betas |",
    ):
        assert f"\n{row}" in page, row
