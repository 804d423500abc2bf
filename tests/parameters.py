"""What parametrized tests take in a quick run, and what they make of a parameter."""

from collections.abc import Callable, Iterable

import pytest


def first_quick(values: Iterable, count: int = 1) -> list:
    """The values of a test, of which only the first are tried in a quick run; the others are `slow`."""
    first, others = list(values)[:count], list(values)[count:]
    return [
        *first,
        *(pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.slow) for each in others),
    ]


class Made(dict):
    """What a function makes of each key, when it is first asked for."""

    def __init__(self, make: Callable):
        super().__init__()
        self._make = make

    def __missing__(self, key):
        self[key] = made = self._make(key)
        return made
