"""What a run says first of its dialect: its name, where the system is built otherwise, what flags have changed."""

import pytest

from engine.algorithms import DIALECTS, NOTES, get_dialect
from training.runtime.first_lines import dialect_lines


@pytest.mark.parametrize("name", DIALECTS)
def test_a_system_is_told_from_what_is_otherwise_here(name):
    lines = dialect_lines(get_dialect(name), {}).splitlines()
    assert lines[0] == f"dialect {name}" and len(lines) == (2 if name in NOTES else 1)
    one_trunk = "value head on the policy's trunk" in lines[-1] and "actor and critic are two engines" in lines[-1]
    assert one_trunk == (name in ("openai", "trlx"))
    assert ("two layers, drawn at random" in lines[-1]) == (name == "trlx")
    assert ("its learning rate falls to a tenth" in lines[-1]) == name.startswith("reinforce_pp")


def test_what_flags_have_changed_stands_behind_it():
    lines = dialect_lines(get_dialect("openai"), {"kl_coef": (0.15, 0.2)}).splitlines()
    assert lines[-1] == "  kl_coef = 0.2 (given; the dialect's is 0.15)" and len(lines) == 3
