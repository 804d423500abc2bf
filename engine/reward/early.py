"""Calls of a reward function, or requests to a reward server, that are made in threads, before anybody waits for what
they return."""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Numbers = tuple[list[float], str | None]  # a number for each response; or what is wrong, in words


class EarlyCalls:
    """Begun calls, in their order and in threads of their own, by the responses that they are of.

    threads: how many calls are made at once.
    """

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reward")
        self._begun: dict[Hashable, tuple[Any, Future[Numbers], int]] = {}

    def begin(self, keys: Sequence[Hashable], texts: Sequence[Any], call: Callable[[], Numbers]) -> None:
        """Begin a call for responses, of which each has a key, and texts by which it is recognised. call: raises
        nothing."""
        if not self.left(keys, texts):
            return  # responses that are drawn again, for lack of memory
        future = self._pool.submit(call)
        self._begun |= {key: (text, future, place) for place, (key, text) in enumerate(zip(keys, texts, strict=True))}

    def left(self, keys: Sequence[Hashable], texts: Sequence[Any]) -> list[int]:
        """The places of those that were not begun with the same texts, or were taken since."""
        pairs = enumerate(zip(keys, texts, strict=True))
        return [place for place, (key, text) in pairs if key not in self._begun or self._begun[key][0] != text]

    def taken(self, keys: Sequence[Hashable], texts: Sequence[Any]) -> tuple[dict[int, float], str | None]:
        """The numbers of those that were begun with the same texts, by their places, when their calls have returned;
        and what was wrong with one. They are then forgotten."""
        found: dict[int, float] = {}
        problem = None
        for place, (key, text) in enumerate(zip(keys, texts, strict=True)):
            begun, future, position = self._begun.pop(key, (None, None, 0))
            if future is None or begun != text:
                continue
            values, wrong = future.result()
            problem = problem or wrong
            if not wrong:
                found[place] = values[position]
        return found, problem
