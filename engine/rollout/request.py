"""A response in the making."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.experience import PromptBatch
from engine.rollout.stops import Ends


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
