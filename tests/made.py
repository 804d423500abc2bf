"""What tests of a module share and make when it is first asked for."""

from collections.abc import Callable


class Made(dict):
    """What a function makes of each key, a family of models, say, when it is first asked for."""

    def __init__(self, make: Callable):
        super().__init__()
        self._make = make

    def __missing__(self, key):
        self[key] = made = self._make(key)
        return made
