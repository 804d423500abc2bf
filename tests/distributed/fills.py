"""How often whole copies are filled."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from engine.zero.gathering import copy_weights


@contextlib.contextmanager
def counted_fills() -> Iterator[list]:
    """Within this context the list, which is given, grows by an entry each time that a copy is filled."""
    fills: list = []

    def copy(*args, **kwargs) -> None:
        fills.append(None)
        copy_weights(*args, **kwargs)

    with mock.patch("engine.copies.copy_weights", copy):
        yield fills
