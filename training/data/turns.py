"""Turns: where in a dialogue, written as one text, a user begins to speak.

Turns(tokenizer).borders("\\n\\nHuman: Hi!\\n\\nAssistant: Hello!\\n\\nHuman: Bye!\\n\\nAssistant:")        # [0, 31]
"""

import os

from engine.errors import UserError
from training.data.chat import TURNS, render

# The user's and the answerer's marks of dialogues that are written as one text: Anthropic/hh-rlhf and its like, and
# sets whose lines were joined.
FORMS = (("\n\nHuman:", "\n\nAssistant:"), (" Human:", " Assistant:"))
SYSTEM = "the-system-message"


class Turns:
    """What stands before a user's turn: by the tokenizer's chat template (`mark`, if it has one), or in a text.

    around_system: what the template writes before and behind a system message within the first user's turn, as
    Llama-2's does; None if it writes it elsewhere, or so that it cannot be told from what the user says.
    """

    def __init__(self, tokenizer):
        self.mark = _mark_of_template(tokenizer)
        self.around_system = _around_system(tokenizer, self.mark) if self.mark else None

    def borders(self, text: str) -> list[int]:
        """The positions, ascending, at which a user's turn begins, its mark included; none where there are no turns.

        The marks of a text are of the form with which it begins; or else, where something stands before the first turn,
        of that with the most turns. Those of another may be quoted in what somebody says, and so may these.
        """
        found = [
            (text.lstrip(" ").startswith(form[0]) or text.startswith(form[0]), _alternating(text, *form))
            for form in FORMS
        ]
        begun = [borders for begins, borders in found if begins and borders]
        if begun:
            return begun[0]
        # A template's own marks are no words, and what it writes behind a user's message is not asked for.
        if self.mark and (borders := _alternating(text, self.mark, "")):
            return borders
        return max((borders for _, borders in found), key=len)

    def head(self, text: str) -> tuple[str, list[int]]:
        """(what stands before the first turn, the positions at which what is left behind it may begin).

        A system message within the first turn belongs to the head, with the mark before it: later turns then begin
        behind their marks.
        """
        borders = self.borders(text)
        if not borders:
            return "", []
        if self.around_system and text.startswith(self.mark, borders[0]):
            before, behind = self.around_system
            first = borders[0] + len(self.mark)
            end = text.find(behind, first + len(before)) if text.startswith(before, first) else -1
            if end >= 0:
                end += len(behind)
                return text[:end], [end, *(border + len(self.mark) for border in borders[1:])]
        return text[: borders[0]], borders


def _alternating(text: str, user: str, answerer: str) -> list[int]:
    """Where a user's mark stands that begins a turn: the first, and the next one behind each answerer's mark.

    None without an answerer's mark behind one of the user's: it is a word of the text then.
    """
    found, answered = [], False
    place = 0 if text.lstrip(" ").startswith(user.lstrip()) else text.find(user)
    while place >= 0:
        found.append(place)
        answer = text.find(answerer, place + 1)
        answered |= answer >= 0
        place = text.find(user, answer) if answer >= 0 else -1
    return found if answered else []


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


def _around_system(tokenizer, mark: str) -> tuple[str, str] | None:
    """What the template writes before and behind a system message, where that stands behind the first user's mark."""
    try:
        text = render(tokenizer, [{"role": "system", "content": SYSTEM}, *TURNS])
    except UserError:  # the template admits none
        return None
    before, found, behind = text.partition(SYSTEM)
    behind, asked, _ = behind.partition(TURNS[0]["content"])
    _, marked, before = before.rpartition(mark)
    inside = found and asked and marked and mark not in behind
    return (before, behind) if inside and before.strip() and behind.strip() else None
