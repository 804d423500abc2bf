"""JSON of others: whatever is wrong with it is a ValueError; no name of an object may stand twice, of which Python's
own reading keeps the last value in silence.

    parsed(text)
    json.loads(text, object_pairs_hook=unique)
"""

import json
from collections import Counter
from typing import Any


class RepeatedName(ValueError):
    """fields: the object as Python reads it. name: what stands in it `count` times."""

    def __init__(self, fields: dict[str, object], name: str, count: int):
        super().__init__(f"{name} stands there {count} times")
        self.fields, self.name, self.count = fields, name, count


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text; raises ValueError for what is none, or too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets within brackets, too deep") from None


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of these names and values; raises RepeatedName."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise RepeatedName(dict(pairs), name, count)
    return dict(pairs)
