"""The page of flags: written from the code, and complete."""

import dataclasses
import re
from pathlib import Path

import pytest

from training.config import flag_docs

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"


def test_the_page_is_what_the_code_makes():
    assert PAGE.read_text() == flag_docs.document(), "run: python -m training.config.flag_docs > docs/flags.md"


@pytest.mark.parametrize("title, flags_class", flag_docs.STEPS)
def test_every_flag_has_one_row(title, flags_class):
    section = flag_docs.section(title, flags_class)
    found = re.findall(r"^\| `--(\w+)` \|", section, re.MULTILINE)
    assert found == [*(spec.name for spec in dataclasses.fields(flags_class)), *flags_class.old_flags]


def test_tables_are_whole():
    """Each row has as many cells as its table's head: an unescaped | in a help text would add one."""
    columns = None
    for line in PAGE.read_text().splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1 if line.startswith("|") else None
        if cells is not None and columns is not None:
            assert cells == columns, line
        columns = cells


def test_some_rows_as_they_should_read():
    step3 = flag_docs.section(*flag_docs.STEPS[2])
    for row in (
        "| `--output_dir` | text | required | folder for models, metrics and checkpoints |",
        "| `--seed` | whole number | `1234` | of data order, fresh weights and sampling |",
        "| `--data_path` | text, one or more | required |",
        "| `--enable_tensorboard` | true or false | `true` |",
        "| `--kl_coef` | number | the dialect's (`0.1`) | coefficient of the KL penalty |",
        "| `--dtype` | `fp32`, `fp16`, `bf16` |  |",
        "| `--max_steps` | whole number |  |",
        "| `--inference_tp_size` | whole number |  |",
        "| `--align_overflow` | yes |",
        "| `--enable_mixed_precision_lora` | no |",
    ):
        assert f"\n{row}" in step3, row
