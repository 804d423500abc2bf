"""Which tests are quick, and which are `slow`: those that start several ranks, compile, or run whole programs.

They are marked by their folder; where families of models are tried, all but Llama are slow; the few that stand
elsewhere bear the mark themselves.
"""

import gc
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLOW = ("distributed", "e2e")
QUICK_FAMILY = "llama"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests below these folders, and those of a `family` that is another."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.relative_to(HERE).parts[0] in SLOW or parameters.get("family", QUICK_FAMILY) != QUICK_FAMILY:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    """A test that joins a group in this process leaves a rank behind, as a launcher would give it."""
    monkeypatch.delenv("RANK", raising=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """No garbage is looked for while all is imported, nor afterwards in what was imported: DeepSpeed collects it for
    each engine."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
