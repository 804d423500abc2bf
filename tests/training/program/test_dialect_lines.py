"""What a run says first of its dialect: its name, where the system is built otherwise, what flags have changed."""

import pytest

from engine.algorithms import DIALECTS, get_dialect
from training.program.first_lines import dialect_lines


@pytest.mark.parametrize("name", DIALECTS)
def test_systems_with_one_trunk_are_told_from_two_engines(name):
    lines = dialect_lines(get_dialect(name), {}).splitlines()
    assert lines[0] == f"dialect {name}"
    assert (len(lines) == 2) == (name in ("openai", "trlx"))
    for line in lines[1:]:
        assert "value head on the policy's trunk" in line and "actor and critic are two engines" in line
    assert ("two layers, drawn at random" in lines[-1]) == (name == "trlx")


def test_what_flags_have_changed_stands_behind_it():
    lines = dialect_lines(get_dialect("openai"), {"kl_coef": (0.15, 0.2)}).splitlines()
    assert lines[-1] == "  kl_coef = 0.2 (given; the dialect's is 0.15)" and len(lines) == 3
