"""Responses in the making: what each has so far, what ends it, and which are decoded side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.experience import PromptBatch


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


@dataclass(slots=True)
class Request:
    """A prompt that asks for a response, and what there is of it.

    row: of the prompts, and of the rollout. prompt_length: its real tokens. most: tokens that the response may have.
    tokens: of the response, as far as the host has looked. drawn: how many there are, looked at or not, those behind an
    end included. ended: whether the response came to an end of its own.
    """

    row: int
    prompt_length: int
    most: int
    tokens: list[int] = field(default_factory=list)
    drawn: int = 0
    ended: bool = False

    @property
    def read(self) -> int:
        """Tokens of prompt and response that the model has read: all but the last that was drawn."""
        return self.prompt_length + self.drawn - 1

    @property
    def finished(self) -> bool:
        """Whether nothing more is to be drawn, as far as the host has looked."""
        return self.ended or len(self.tokens) >= self.most

    def look(self, drawn: Sequence[int], ends: Ends) -> None:
        """Take tokens that were drawn since the last look, up to the first end."""
        looked_at = len(self.tokens)
        self.tokens += drawn[: self.most - looked_at]
        end = ends.first(self.tokens, looked_at)
        if end is not None:
            self.ended = True
            del self.tokens[end:]


def requests_of(prompts: PromptBatch, most: int) -> list[Request]:
    """A request for each row of the prompts, in their order. most: tokens that a response may have."""
    return [Request(row, length, most) for row, length in enumerate(prompts.attention_mask.sum(-1).tolist())]


class Schedule:
    """Rows that have ended make room for prompts that wait, longest first.

    requests: all that are to be answered. rows: how many are decoded side by side. `living` are those that are, each in
    the row of the batch that is its place in the list.
    """

    def __init__(self, requests: Sequence[Request], rows: int):
        self.rows = min(rows, len(requests))
        self.living: list[Request] = []
        self._waiting = sorted(requests, key=lambda request: request.prompt_length)  # taken from the end

    @property
    def open(self) -> int:
        """Requests that are not finished."""
        return len(self._waiting) + len(self.living)

    def join(self) -> list[Request]:
        """The requests that begin now, at the end of `living`; none until there is room for a good part of what fits,
        since reading their prompts holds up all others."""
        room = self.rows - len(self.living)
        if room < self.rows // 8:
            return []
        joining = [self._waiting.pop() for _ in range(min(room, len(self._waiting)))]
        self.living += joining
        return joining

    def leave(self) -> tuple[list[int], list[int]]:
        """Let finished requests go; the last of those that stay take their rows.

        Returns: rows to be moved, and where to. Behind it rows 0 to len(living) - 1 are in use.
        """
        sources, targets, kept = rows_to_move([not request.finished for request in self.living])
        for source, target in zip(sources, targets, strict=True):
            self.living[target] = self.living[source]
        del self.living[kept:]
        return sources, targets


def rows_to_move(stays: Sequence[bool]) -> tuple[list[int], list[int], int]:
    """How rows that stay come to stand in rows 0 to n - 1: the last of them take the places of those that leave.

    stays: of each row. Returns: rows to be moved, where to, and n.
    """
    kept = sum(stays)
    targets = [row for row in range(kept) if not stays[row]]
    sources = [row for row in range(kept, len(stays)) if stays[row]]
    return sources, targets, kept
