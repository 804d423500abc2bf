"""Options: what a field's metadata makes of its values, and that all fields' conditions name fields that are there."""

import dataclasses
from dataclasses import dataclass

import pytest

from engine.algorithms import Dialect
from engine.options import REQUIRED, choices_of, default_of, fault, option, unmet
from training.config.parsing import STEPS
from training.tools.audit.flags import AuditFlags
from training.tools.compare.flags import CompareFlags
from training.tools.memory.flags import MemoryFlags
from training.tools.merge.flags import MergeFlags
from training.tools.serve.flags import ServeFlags

TABLE = {"one": 1}


@dataclass
class Options:
    """One of each kind."""

    size: int = option(3, "a number", least=1, most=4)
    rate: float | None = option(None, "a number", above=0, below=1)
    wait: float = option(1.0, "a number of any size", finite=False, only_with="size=3|4")
    pair: tuple[float, float] = option((0.1, 0.2), "numbers", least=0)
    names: list[str] = option([], "texts", only_with=("rate", "kind=two"))
    kind: str = option("one", "of a table that grows", choices=lambda: ("none", *TABLE))


def spec(name: str) -> dataclasses.Field:
    return Options.__dataclass_fields__[name]


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("size", 0, "must be at least 1."),
        ("size", 5, "must be at most 4."),
        ("size", 4, None),
        ("rate", None, None),
        ("rate", 0.0, "must be greater than 0."),
        ("rate", 1.0, "must be less than 1."),
        ("rate", float("nan"), "must be greater than 0."),
        ("pair", (0.1, float("inf")), "each must be finite."),
        ("pair", (-0.1, 0.1), "each must be at least 0."),
        ("wait", float("inf"), None),
        ("kind", "two", "known are none, one."),
    ],
)
def test_what_a_value_must_be(name, value, reason):
    assert fault(spec(name), value) == reason


def test_choices_are_those_of_the_moment(monkeypatch):
    monkeypatch.setitem(TABLE, "two", 2)
    assert choices_of(spec("kind")) == ("none", "one", "two") and fault(spec("kind"), "two") is None


def test_without_what_an_option_has_no_effect():
    assert unmet(Options(), spec("names")) == [("rate", []), ("kind", ["two"])]
    assert unmet(Options(rate=0.5), spec("names")) == unmet(Options(kind="two"), spec("names")) == []
    assert unmet(Options(size=2), spec("wait")) == [("size", ["3", "4"])] and unmet(Options(), spec("wait")) == []
    assert unmet(Options(), spec("size")) == []


def test_lists_are_nobody_elses():
    Options().names.append("changed")
    assert Options().names == [] == default_of(spec("names"))


@pytest.mark.parametrize(
    "options",
    [Dialect, *STEPS, MemoryFlags, MergeFlags, CompareFlags, AuditFlags, ServeFlags],
    ids=lambda one: one.__name__,
)
def test_conditions_name_options_and_values_that_are_there(options):
    """A condition on a name that no class has would be met by nothing, and asked of nobody."""
    fields = {spec.name: spec for spec in dataclasses.fields(options)}
    for spec in fields.values():
        conditions = [condition.partition("=") for condition in spec.metadata["only_with"]]
        known = [(name, values) for name, _, values in conditions if name in fields]
        assert bool(known) == bool(conditions), spec.name
        for name, values in known:
            choices = choices_of(fields[name])
            wanted = set(values.split("|")) if values and choices else set()
            assert wanted <= set(choices or ()), (spec.name, name)
        assert default_of(spec) is REQUIRED or fault(spec, default_of(spec)) is None
        assert spec.metadata["help"]
