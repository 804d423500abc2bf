"""Which requests are decoded side by side, and which wait."""

from collections.abc import Sequence

from engine.rollout.request import Request


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
