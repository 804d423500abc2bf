"""What ends a response."""

from collections.abc import Sequence


class Ends:
    """Tokens that end a response, and strings that end it with the token that completes them."""

    def __init__(self, tokenizer, tokens: Sequence[int] = (), strings: Sequence[str] = ()):
        self.tokenizer, self.tokens, self.strings = tokenizer, frozenset(tokens), tuple(strings)

    def first(self, response: list[int], start: int = 0) -> int | None:
        """How many tokens of a response come up to its first end, the end included; None where there is none.

        start: no token before this place ends it.
        """
        end = next((place + 1 for place in range(start, len(response)) if response[place] in self.tokens), None)
        before = response[:end]
        if not self.strings or not self._holds_string(before):
            return end
        low, high = 1, len(before)  # the shortest that holds one: once complete, a string stays in the text
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds_string(before[:middle]) else (middle + 1, high)
        return low

    def _holds_string(self, tokens: list[int]) -> bool:
        text = self.tokenizer.decode(tokens)
        return any(string in text for string in self.strings)
