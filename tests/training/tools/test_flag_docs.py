"""The page of flags: written from the code, and complete."""

import dataclasses
import re
from pathlib import Path

import pytest

from engine.algorithms import Dialect
from training.tools import flag_docs

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"


def test_the_page_is_what_the_code_makes():
    assert PAGE.read_text() == flag_docs.document(), "run: python -m training.tools.flag_docs > docs/flags.md"


PROGRAMS = [programs[0] for _, programs in flag_docs.SECTIONS if len(programs) == 1]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_flag_of_a_program_has_one_row_or_is_named_once(program):
    told, found = {}, []
    for title, programs in flag_docs.SECTIONS:
        text = flag_docs.section(title, programs, told)
        if program in programs:
            found += re.findall(r"^\| `--(\w+)` \|", text, re.MULTILINE)
            found += re.findall(r"`--(\w+)`[,.]", "\n".join(re.findall("^From the section .*", text, re.MULTILINE)))
    assert sorted(found) == sorted(spec.name for spec in dataclasses.fields(program))


def test_what_the_three_steps_share_is_said_once():
    for name in ("--seed", "--data_path", "--save_steps", "--only_optimize_lora"):
        rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
        assert len(rows) == (2 if name == "--data_path" else 1), rows  # merging can do without


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
        "| `--output_dir` | text | required | folder for models, metrics and checkpoints: new, empty, or that of",
        "| `--seed` | integer ≥ 0, ≤ 2147483647 | `1234` | seed of data order, new weights",
        "| `--data_path` | text, one or more | required |",
        "| `--enable_tensorboard` | switch | `true` |",
        "| `--kl_coef` | number ≥ 0 | the dialect's (`0.1`) | coefficient of the KL penalty |",
        "| `--dtype` | `fp32`, `fp16`, `bf16` | |",
        "| `--max_steps` | integer ≥ 1 | |",
        "| `--inference_tp_size` | integer ≥ 1 | |",
        "| `--actor_learning_rate` | number ≥ 0 | the dialect's (`1e-05`) | peak learning rate of the actor |",
        "| `actor_lr` | number ≥ 0 | `1e-05` | `--actor_learning_rate` | |",
        "| `betas` | number ≥ 0, < 1, two | `(0.9, 0.95)` | | Adam's betas |",
    ):
        assert f"\n{row}" in page, row
