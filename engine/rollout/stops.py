"""Strings that end a response."""

from collections.abc import Callable


def stop_finder(tokenizer, strings: tuple[str, ...]) -> Callable[[list[int]], int | None]:
    """Where the first of these strings is complete in a list of tokens: the number of tokens up to it, or None."""

    def find(tokens: list[int]) -> int | None:
        def holds(count: int) -> bool:
            text = tokenizer.decode(tokens[:count])
            return any(string in text for string in strings)

        if not strings or not holds(len(tokens)):
            return None
        low, high = 1, len(tokens)  # the shortest prefix that holds one: once complete, a string stays in the text
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

    return find
