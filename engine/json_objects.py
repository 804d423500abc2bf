"""JSON objects in which no name stands twice: Python's own reading keeps the last value in silence.

json.loads(text, object_pairs_hook=unique)
"""

from collections import Counter


class RepeatedName(ValueError):
    """fields: the object as Python reads it. name: what stands in it `count` times."""

    def __init__(self, fields: dict[str, object], name: str, count: int):
        super().__init__(f"{name} stands there {count} times")
        self.fields, self.name, self.count = fields, name, count


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of these names and values; raises RepeatedName."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise RepeatedName(dict(pairs), name, count)
    return dict(pairs)
