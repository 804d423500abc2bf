"""Turns messages into text with the tokenizer's chat template, a program that comes with the model.

`Turns` finds the positions at which a user's turn begins, in a dialogue that is given as one text.
"""

import json
import os

from jinja2 import TemplateError

from engine.errors import UserError

REMEDY = "Correct chat_template in its tokenizer_config.json (or chat_template.jinja), or give --chat_template FILE."
# The dialogue with which a template is tried.
TURNS = ({"role": "user", "content": "the-question"}, {"role": "assistant", "content": "the-reply"})


class Rendered(str):
    """A text made by a chat template. The template decides whether the text begins with a BOS; none is added to it."""


def render(tokenizer, messages: list[dict], where: str = "", **options) -> Rendered:
    """Render the messages as one text.

    where: the record and column of the messages, for error messages; empty for a made-up dialogue, whose texts the
    template may leave out. options: arguments of apply_chat_template.
    Raises: UserError if the template cannot render a simple question with its reply, or these messages.
    """
    name = getattr(tokenizer, "name_or_path", None) or "the model"
    broken, lossy = _tried(tokenizer)
    problem = broken or (lossy if where else None)
    if problem:
        raise UserError(f"the chat template of {name} {problem}. {REMEDY}")
    place = f"{where}: " if where else ""
    try:
        return Rendered(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TemplateError as error:
        raise UserError(
            f"{place}the chat template of {name} refuses these messages ({_line(error)}). Correct the record, take it "
            "out, or change the template."
        ) from None
    except Exception as error:  # a template's mistakes may raise anything
        raise UserError(
            f"{place}the chat template of {name} fails with these messages ({_line(error)}). {REMEDY}"
        ) from None


def template_key(tokenizer) -> str:
    """A key that identifies the tokenizer's chat template."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template, default=repr)


_trials: dict[str, tuple[str | None, str | None]] = {}  # the results of `_tried`, by template_key


def _tried(tokenizer) -> tuple[str | None, str | None]:
    """(why the template cannot be used at all, why it cannot be used for the data's messages); each is None if it
    can."""
    template = template_key(tokenizer)
    if template not in _trials:
        try:
            _trials[template] = None, _loss(tokenizer)
        except Exception as error:
            _trials[template] = f"fails with a question and its reply ({_line(error)})", None
    return _trials[template]


def _loss(tokenizer) -> str | None:
    """A description of the texts that the template leaves out of a question with its reply, or None."""
    question, reply = TURNS
    lossy = None
    for turns, options in (([question, reply], {}), ([question], {"add_generation_prompt": True})):
        found = tokenizer.apply_chat_template(turns, tokenize=False, **options)
        lost = [turn["content"] for turn in turns if not isinstance(found, str) or turn["content"] not in found]
        if lost:
            lossy = f"leaves texts out: of {' and '.join(lost)} nothing is in {_short(repr(found))}"
    return lossy


def _line(error: Exception) -> str:
    return _short(" ".join(str(error).split()) or type(error).__name__)


def _short(text: object) -> str:
    line = str(text) if str(text).isprintable() and str(text) else repr(text)
    return line if len(line) <= 200 else line[:200] + "..."


# (mark before a user's turn, mark before an answer) in dialogues that are written as one text: in Anthropic/hh-rlhf and
# similar data sets, and in data sets whose lines were joined.
FORMS = (("\n\nHuman:", "\n\nAssistant:"), (" Human:", " Assistant:"))
SYSTEM = "the-system-message"


class Turns:
    """Finds where users' turns begin in a text: at the mark that the tokenizer's chat template writes before each of
    them, or at words such as "Human:" in plain texts.

    mark: the template's mark, if it has one. around_system: the texts that the template writes before and after the
    system message, if it writes the system message within the first user's turn, as Llama-2's template does. None if
    the template writes the system message elsewhere, or if the system message cannot be told apart from the user's
    words.
    """

    def __init__(self, tokenizer):
        self.mark = _mark_of_template(tokenizer)
        self.around_system = _around_system(tokenizer, self.mark) if self.mark else None

    def borders(self, text: str) -> list[int]:
        """The positions at which users' turns (with their marks) begin, in rising order; empty if there are no turns.

        Only marks of one form count, since marks of another form may be quotations. This is the form whose mark begins
        the text; otherwise the template's form if its mark occurs; otherwise the form with the most turns.
        """
        found = [
            (text.lstrip(" ").startswith(form[0]) or text.startswith(form[0]), _alternating(text, *form))
            for form in FORMS
        ]
        begun = [borders for begins, borders in found if begins and borders]
        if begun:
            return begun[0]
        # A template's mark does not occur as a word of a text, so the marks before answers need not be looked for.
        if self.mark and (borders := _alternating(text, self.mark, "")):
            return borders
        return max((borders for _, borders in found), key=len)

    def head(self, text: str) -> tuple[str, list[int]]:
        """(the head, which is the text before the first turn; the positions at which the rest of the text may begin
        when the text is cut).

        A system message within the first turn, and the mark before the system message, belong to the head. The rest may
        then begin right after the system message, or right after the mark of a later turn.
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
    """The positions of the user's marks that begin a turn: the first mark of a user, and the next one after each mark
    of an answer.

    Empty if no mark of an answer follows a user's mark: the user's mark is then an ordinary word of the text.
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
    """The text that the chat template writes before a user's message; None without a template, or if the template
    writes nothing there."""
    if not tokenizer.chat_template:
        return None
    question, reply = TURNS
    following = {**question, "content": "the-next-one"}
    try:
        text, ended = render(tokenizer, [question, reply, following]), render(tokenizer, [question, reply])
    except UserError:  # the template refuses a third message
        return None
    before, _, rest = text.partition(question["content"])
    between, found, _ = rest.partition(reply["content"])[2].partition(following["content"])
    if not found:
        return None
    # What stands before the first question may include a system message; what stands before the next question includes
    # the end of the reply. The mark is the part that both have in common.
    mark = os.path.commonprefix([before[::-1], between[::-1]])[::-1]
    end = ended.rpartition(reply["content"])[2]
    if between.startswith(end):
        mark = mark[-(len(between) - len(end)) :] if len(between) > len(end) else ""
    return mark if mark.strip() else None


def _around_system(tokenizer, mark: str) -> tuple[str, str] | None:
    """(the text before, the text after) the system message, if the template writes the system message after the first
    user's mark; else None."""
    try:
        text = render(tokenizer, [{"role": "system", "content": SYSTEM}, *TURNS])
    except UserError:  # the template refuses a system message
        return None
    before, found, behind = text.partition(SYSTEM)
    behind, asked, _ = behind.partition(TURNS[0]["content"])
    _, marked, before = before.rpartition(mark)
    inside = found and asked and marked and mark not in behind
    return (before, behind) if inside and before.strip() and behind.strip() else None
