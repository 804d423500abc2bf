"""The named dialects, field by field; how a user changes one; what cannot go together; the printed table."""

import dataclasses

import pytest

from engine.algorithms import DIALECTS, Dialect, get_dialect
from engine.errors import UserError
from tests.engine.algorithms.group_fields import GROUPS
from tests.engine.algorithms.system_fields import DEEPSPEED_CHAT, OTHERS


# What each system's source says, in every field; a new field needs a value here too.
@pytest.mark.parametrize("name", ["deepspeed_chat", *OTHERS, *GROUPS])
def test_each_system_in_every_field(name):
    departures = (OTHERS | GROUPS).get(name, {})
    assert dataclasses.asdict(get_dialect(name)) == {**DEEPSPEED_CHAT, **departures, "name": name}


def test_default_is_what_a_dialect_is_if_nothing_is_said():
    assert get_dialect("default") == Dialect()


def test_names_in_the_table_are_the_dialects_own():
    assert list(DIALECTS) == ["default", "deepspeed_chat", *OTHERS, *GROUPS]
    assert all(name == dialect.name for name, dialect in DIALECTS.items())
    with pytest.raises(UserError, match="'deepspeed': known are default, deepspeed_chat, .*, rloo."):
        get_dialect("deepspeed")
