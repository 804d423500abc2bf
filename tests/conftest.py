"""Which tests are quick, and which are `slow`: those that start several ranks, compile, or run whole programs.

They are marked by their folder; the few that stand elsewhere bear the mark themselves.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLOW = ("distributed", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests below these folders."""
    for item in items:
        if item.path.relative_to(HERE).parts[0] in SLOW:
            item.add_marker(pytest.mark.slow)
