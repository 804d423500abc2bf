"""What a response says, a piece at a time: no half characters, nothing behind a stop string."""

from collections.abc import Sequence

BEFORE = 8  # tokens of the prompt that a response is decoded behind: many tokenizers drop the space a text begins with
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer puts for the bytes of a character that is not complete


class ResponseText:
    """The text of a response whose tokens come one by one.

    Special tokens are left out. Text that may turn out to be the beginning of a stop string is held back until that is
    known; of a stop string that is complete, and of what follows, nothing is said.

    stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer, prompt_ids: Sequence[int], stops: Sequence[str] = ()):
        self.tokenizer, self.stops, self.stopped = tokenizer, tuple(stops), False
        self._ids = list(prompt_ids[-BEFORE:])
        self._start, self._said = 0, len(self._ids)  # tokens from start on are decoded, those before `said` are known
        self._held = ""

    def add(self, token: int) -> str:
        """Take the next token; returns what can be said now."""
        self._ids.append(token)
        text = self._decoded()
        return "" if text.endswith(UNFINISHED) else self._past_stops(self._new(text))

    def finish(self) -> str:
        """What is left to be said once no token follows."""
        text = self._past_stops(self._new(self._decoded()))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _decoded(self) -> str:
        return self.tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)

    def _new(self, text: str) -> str:
        """What `text`, decoded from `_start` on, has beyond what was told; from now on it is known."""
        known = self.tokenizer.decode(self._ids[self._start : self._said], skip_special_tokens=True)
        new = text[len(known) :] if text.startswith(known) else ""
        if new:  # else a special token: what follows is still decoded behind the last text, for its space
            self._start = self._said
        self._said = len(self._ids)
        return new

    def _past_stops(self, new: str) -> str:
        text = self._held + new
        found = [place for place in map(text.find, self.stops) if place >= 0]
        if found or self.stopped:
            self.stopped, self._held = True, ""
            return text[: min(found)] if found else ""
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
