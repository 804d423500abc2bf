"""What all tests of the memory planner need."""

import pytest


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    """The planner is a program of its own; other tests, which join a group in this process, leave a rank behind."""
    monkeypatch.delenv("RANK", raising=False)
