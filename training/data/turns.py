"""Turns: where in a dialogue, written as one text, a user begins to speak.

Turns(tokenizer).borders("\\n\\nHuman: Hi!\\n\\nAssistant: Hello!\\n\\nHuman: Bye!\\n\\nAssistant:")        # [0, 31]
"""

import os
import re

from engine.errors import UserError
from training.data.chat import TURNS, render

# Of dialogues that are written as one text: Anthropic/hh-rlhf and its like, and sets whose lines were joined.
MARKS = ("\n\nHuman:", " Human:")


class Turns:
    """What stands before a user's turn: by the tokenizer's chat template, or else one of `MARKS`."""

    def __init__(self, tokenizer):
        self.marks = [*filter(None, [_mark_of_template(tokenizer)]), *MARKS]

    def borders(self, text: str) -> list[int]:
        """The positions, ascending, at which a user's turn begins, its mark included; none where there are no turns.

        The first kind of mark that the text has counts, for others may be quoted in what somebody says.
        """
        mark = next((mark for mark in self.marks if mark in text), None)
        if mark is None:
            return []
        found = [match.start() for match in re.finditer(re.escape(mark), text)]
        return found if found[0] == 0 or not text.startswith(mark.lstrip()) else [0, *found]


def _mark_of_template(tokenizer) -> str | None:
    """What the chat template writes before a user's message; None without a template, or where it writes nothing."""
    if not tokenizer.chat_template:
        return None
    question, reply = TURNS
    following = {**question, "content": "the-next-one"}
    try:
        text, ended = render(tokenizer, [question, reply, following]), render(tokenizer, [question, reply])
    except UserError:  # the template admits no third message
        return None
    before, _, rest = text.partition(question["content"])
    between, found, _ = rest.partition(reply["content"])[2].partition(following["content"])
    if not found:
        return None
    # Before the first question a system message may stand, and before the next one the reply's own end.
    mark = os.path.commonprefix([before[::-1], between[::-1]])[::-1]
    end = ended.rpartition(reply["content"])[2]
    if between.startswith(end):
        mark = mark[-(len(between) - len(end)) :] if len(between) > len(end) else ""
    return mark if mark.strip() else None
