"""Checks records and turns them into rows. A `Form` says which columns of a record a step reads.

    SFT.row(where, {"prompt": "Hi", "chosen": " Hello."}, tokenizer)        # {"prompt": "Hi", "response": " Hello."}

The tokenizer's chat template turns messages into texts. All three steps make the same prompt text of a record. A
template may silently ignore roles, reasoning or tools. Therefore each message's content is looked for in the rendered
text. If a part of the context is missing there, the row gets a note, and the run prints which share of the rows has
this note. If the message to be answered or the answer to be learned is missing, the record is refused.
"""

import functools
import json
import os.path
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from engine.errors import UserError
from training.data.chat import TURNS, render, template_key
from training.data.files import check_text, described, quoted
from training.data.tokens import end_of_turn, opening_tokens

Columns = tuple[tuple[str, ...], ...]  # alternatives; a record needs all columns of one alternative
ANSWERS = ("chosen", "rejected", "response", "completion")
TURN = "\n\nAssistant:"  # the beginning of an answer in dialogues written as one text, such as Anthropic/hh-rlhf
# {role in a data set, in small letters: the role's name in templates}; other roles are left as they are.
ROLES = {name: name for name in ("user", "assistant", "system", "developer", "tool")} | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
}
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys under which transformers looks for reasoning
SAME = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)  # keys by which messages are compared
# Arguments of the function apply_chat_template, which the template itself does not get.
NOT_THE_TEMPLATES = frozenset(
    ("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")
    + ("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs")
    + ("return_assistant_tokens_mask", "processor_kwargs")
)
OTHER_TEMPLATE = "another template (--chat_template FILE)"
NO_BEGINNING = (
    "the chat template does not begin an answer when it is asked to (add_generation_prompt): what it puts before one "
    f"is learned as a part of it. Give {OTHER_TEMPLATE} that does"
)
REPEATED = (
    "answers begin with the prompt, which steps 1 and 2 then show twice, and step 3 once. Take it off the answers "
    "(jq -c '.prompt as $p | map_values(if . == $p then . else ltrimstr($p) end)' OLD.jsonl > NEW.jsonl), or leave out "
    f"the column prompt, if the answers are dialogues with {TURN!r}"
)


class Row(dict):
    """The checked texts of a record. notes: what the model may be shown otherwise than it is meant: messages that are
    left out, special tokens within answers and messages, repeated prompts. dialogue: the messages of the prompt as the
    user gave them, {"messages": [...], "tools": [...] or None}; None if the prompt was given as a text."""

    def __init__(self, texts: dict, notes: tuple[str, ...] = (), dialogue: dict | None = None):
        super().__init__(texts)
        self.notes = notes
        self.dialogue = dialogue


@dataclass(frozen=True, slots=True)
class Form:
    """How one step reads records.

    name: the form's name; part of the rows' fingerprint. columns: alternatives; the first one whose columns the record
    has is used. shape: (record, texts of these columns) -> the row. may_be_blank: whether texts may be blank.
    answers: whether answers are read; if True, messages are read up to the assistant's last one. If False, prompts
    alone are read. tools: JSON schemas that the chat template gets in place of the record's column `tools`.
    """

    name: str
    columns: Columns
    shape: Callable[[dict, dict[str, str]], dict]
    may_be_blank: bool = False
    answers: bool = True
    tools: tuple[dict, ...] = ()

    def row(self, where: str, record: object, tokenizer) -> Row:
        """The row made from this record. where: the record's place, for messages. A record with messages needs a
        tokenizer with a chat template; a record with texts does not.

        Raises UserError, with the place and the column, if the record has the columns of no alternative, or if one of
        its texts cannot be tokenised.
        """
        _check_depth(where, record)
        _refuse_media(where, record)
        record = messages_on_both_sides(_from_share_gpt(record)) if isinstance(record, dict) else record
        names = matching_columns(where, record, self.columns)
        if "completion" in names and isinstance(record.get("label"), bool):
            raise UserError(
                f"{where}: found the column label ({record['label']}) beside prompt and completion: by "
                "TRL's form for unpaired preferences it says whether the completion is good, and all completions would "
                "be learned. Keep the records whose completion is good, and take the column label out."
            )
        if names == ("messages",) or any(is_dialogue(record[name]) for name in names if name != "text"):
            told = {**record, "tools": [*self.tools]} if self.tools else record
            texts, notes, dialogue = messages_as_texts(where, told, names, tokenizer, self.answers)
            return Row(self.shape(record, texts), notes, dialogue)
        if names == ("chosen", "rejected"):
            texts = _split_dialogues(where, record)
        else:
            texts = {name: record[name] for name in names}
            for name, text in texts.items():
                check_text(where, name, text, self.may_be_blank or (name == "prompt" and len(names) > 1))
        notes = _notes_on_texts(texts, tokenizer) if tokenizer is not None else ()
        return Row(self.shape(record, texts), (*notes, UNTOLD) if self.tools else notes)


def _sft_row(record: dict, texts: dict[str, str]) -> dict:
    if "text" in texts:
        return texts
    answer = next(texts[name] for name in ("chosen", "response", "completion") if name in texts)
    return {"prompt": texts["prompt"], "response": answer}


# `chosen` comes before `response`: data sets such as Dahoas/rm-static have both columns, and `chosen` is the better
# answer of the pair.
SFT = Form(
    "text",
    (
        ("messages",),
        ("prompt", "chosen"),
        ("prompt", "response"),
        ("prompt", "completion"),
        ("chosen", "rejected"),
        ("text",),
    ),
    _sft_row,
)
PAIRS = Form("pair", (("prompt", "chosen", "rejected"), ("chosen", "rejected")), lambda record, texts: texts)


@dataclass(frozen=True, slots=True)
class StepsForm(Form):
    """How step 2 reads stepwise records, in TRL's form: a prompt, its steps (`completions`), and a label for each step:
    true or false, or the probability that the step is good; null if it is not to be learned.

    step_end: the text with which each step but the last ends; it is added where a step has none. The row has `prompt`,
    `response`, which joins the steps, and `labels`: one for each end of a step in the response, None for ends within a
    given step.
    """

    step_end: str = "\n"

    def row(self, where: str, record: object, tokenizer) -> Row:
        """As Form.row. Raises UserError too if steps and labels do not fit each other."""
        matching_columns(where, record, self.columns)
        assert isinstance(record, dict)
        steps, given = record["completions"], record["labels"]
        if not isinstance(steps, list) or not isinstance(given, list) or not 0 < len(steps) == len(given):
            counts = (f"{len(each)} " if isinstance(each, list) else "" for each in (steps, given))
            raise UserError(
                f"{where}: found {next(counts)}completions {quoted(str(steps))} and {next(counts)}labels "
                f"{quoted(str(given))}. Give a list of steps, and a list with a label for each."
            )
        text, labels = "", []
        for number, (step, label) in enumerate(zip(steps, given), start=1):
            place = f"completions, step {number}"
            check_text(where, place, step)
            if label is not None and not (isinstance(label, bool | int | float) and 0 <= label <= 1):
                found = f"{where}, column labels, step {number}: found {described(label)}"
                raise UserError(f"{found}. Give true, false, a number from 0 to 1, or null.")
            ends = sum(bool(part.strip()) for part in step.split(self.step_end))
            if not ends:
                raise UserError(f"{where}, column {place}: found no text but the end of a step. Take the step out.")
            labels += [None] * (ends - 1) + [None if label is None else float(label)]
            text += step if step.endswith(self.step_end) or number == len(steps) else step + self.step_end
        others = {name: record[name] for name in ("prompt", "tools", "chat_template_kwargs") if name in record}
        row = SFT.row(where, {**others, "completion": text}, tokenizer)
        return Row({**row, "labels": labels}, row.notes, row.dialogue)


def stepwise(step_end: str) -> Form:
    """The form of stepwise records whose steps end with this text."""
    columns = (("prompt", "completions", "labels"),)
    return StepsForm(f"steps ended by {step_end!r}", columns, lambda record, texts: texts, step_end=step_end)


PROMPTS = Form(
    "prompt",
    (("messages",), ("prompt",), ("chosen", "rejected")),
    lambda record, texts: {**record, "prompt": texts["prompt"]},
    answers=False,
)
UNTOLD = "the prompt is a text, in which the tools are not described. Give messages, or describe them in the text"


def prompts_with(tools: Iterable[dict]) -> Form:
    """PROMPTS, whose chat template gets these tools. tools: JSON schemas; without any, PROMPTS itself."""
    tools = tuple(tools)
    return replace(PROMPTS, name=f"prompt, tools {json.dumps(tools)}", tools=tools) if tools else PROMPTS


TEXTS = Form("pretraining text", (("text",),), lambda record, texts: texts, may_be_blank=True)  # some have empty lines


def matching_columns(where: str, record: object, columns: Columns) -> tuple[str, ...]:
    """The first alternative whose columns the record has (null counts as absent). Raises UserError if there is no such
    alternative."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: found {described(record)}; a record is an object with {alternatives(columns)}.")
    present = {name for name, value in record.items() if value is not None}
    wanted = next((names for names in columns if present.issuperset(names)), None)
    if wanted is None:
        found = ", ".join(name if name in present else f"{name} (null)" for name in record) or "none"
        raise UserError(
            f"{where}: found the columns: {quoted(found, 400)[1:-1]}; needed: {alternatives(columns)}. "
            f"{'Null counts as absent. ' * (len(present) < len(record))}{_remedy(record, columns)}"
        )
    return wanted


def alternatives(columns: Columns) -> str:
    """The alternatives as a text for a message."""
    return ", or ".join(" + ".join(names) for names in columns)


def _remedy(record: dict, columns: Columns = (), otherwise: str = "Rename or add them.") -> str:
    """The advice for a record without the needed columns; records of two well-known forms get advice of their own."""
    if record.get("instruction") is not None:
        if all("rejected" in names for names in columns) and record.get("rejected") is None:
            return "It has one answer and no worse one to compare it with. Step 1 can learn from such records."
        return (
            "Choose how an instruction becomes a prompt. docs/data.md has a command that writes it as a user's "
            "message, with its input below it; a model without a chat template then needs --chat_template FILE."
        )
    if all("rejected" in names for names in columns) and {"completions", "labels"} <= record.keys():
        return "Steps with labels are read with --step_end, which says how a step ends (docs/step_rewards.md)."
    if any("completions" in names for names in columns) and {"chosen", "rejected"} <= record.keys():
        return "Without --step_end pairs are read."
    for name, value in record.items():
        inner = value[0] if isinstance(value, list) and value else None
        if isinstance(inner, dict) and "role" not in inner and not _is_turn(inner):
            return (
                f"{otherwise} If the records are those in {name}, write one a line: "
                f"jq -c {shlex.quote(f'.[{json.dumps(name)}][]')} OLD.json > NEW.jsonl"
            )
    return otherwise


DEEPEST = 100  # limit of the nesting of lists and objects in a record


def _check_depth(where: str, record: object) -> None:
    """Raise UserError if the record's JSON is nested too deeply to be written into a message or read from the cache."""
    level = [record] if isinstance(record, (dict, list)) else []
    for _ in range(DEEPEST):
        values = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [value for value in values if isinstance(value, (dict, list))]
        if not level:
            return
    raise UserError(f"{where}: found more than {DEEPEST} lists within lists. Correct the record or take it out.")


MEDIA = ("image", "video", "audio")
TEXTS_ALONE = (
    "Models are shown texts alone here, and would learn to answer about what they cannot see. Take the record out, or"
)


def _refuse_media(where: str, record: object) -> None:
    """Raise UserError if the record has a column of images or videos, which other programs show to the model."""
    for name in ("image", "images", "video", "videos") if isinstance(record, dict) else ():
        if record.get(name):
            raise UserError(
                f"{where}, column {name}: found {described(record[name])}. {TEXTS_ALONE} the column if the texts do "
                "without it."
            )


def _split_dialogues(where: str, record: dict) -> dict[str, str]:
    """Split two dialogues that are written as texts into {"prompt", "chosen", "rejected"}.

    The prompt is the common beginning of both dialogues, up to its last `TURN`. An answer may be empty, as in some data
    sets.
    """
    for name in ("chosen", "rejected"):
        check_text(where, name, record[name])
    shared = os.path.commonprefix([record["chosen"], record["rejected"]])
    end = shared.rfind(TURN) + len(TURN)
    if end < len(TURN):
        raise UserError(
            f"{where}, columns chosen and rejected: found no {TURN!r} in what both begin with; without a "
            f"column prompt they are dialogues with the same beginning, which ends with {TURN!r}. "
            + _remedy(record, otherwise="Add a column prompt, or take the record out.")
        )
    return {"prompt": shared[:end], "chosen": record["chosen"][end:], "rejected": record["rejected"][end:]}


def _from_share_gpt(record: dict) -> dict:
    """The record with ShareGPT's turns, {"from", "value"}, turned into messages; its `system` text becomes the first
    message.

    The column `conversations` becomes `messages`, or `prompt` if `chosen` and `rejected` have a single turn each. If
    the record has another column with the prompt, `conversations` stays as it is.
    """
    turns = {name: _messages(record[name]) for name in ("messages", "prompt", *ANSWERS) if name in record}
    conversation = next((record[name] for name in ("conversations", "conversation") if record.get(name)), None)
    pair = all(is_dialogue(turns.get(name)) and len(turns[name]) == 1 for name in ("chosen", "rejected"))
    others = ("messages", "prompt", "text", *(() if pair else ("chosen",)))
    if isinstance(conversation, list) and all(record.get(name) is None for name in others):
        turns["prompt" if pair else "messages"] = _messages(conversation)
    for name in ("messages", "prompt"):
        messages = turns.get(name)
        if record.get("system") and is_dialogue(messages) and messages[0].get("role") != "system":
            turns[name] = [{"role": "system", "content": record["system"]}, *messages]
    return record | turns


def _messages(value: Any) -> Any:
    """A list of ShareGPT's turns, or a single turn, turned into messages; any other value as it is."""
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        return value
    return [{"role": turn["from"], "content": turn["value"]} for turn in turns]


def _is_turn(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("from"), str) and "value" in value


def messages_on_both_sides(record: dict) -> dict:
    """The record with messages for both the prompt and the answers, if one of the two has messages.

    If the other one is a text, the text becomes one message: a prompt becomes a message of the user, an answer a
    message of the assistant. If the answers are whole dialogues, which contain the prompt, a prompt that is given as
    text is left out.
    """
    listed = [record[name] for name in ANSWERS if is_dialogue(record.get(name))]
    if listed and isinstance(record.get("prompt"), str):
        begins = [_role(messages[0]) for messages in listed]
        if len(begins) == 2 and "assistant" not in begins:
            return {name: value for name, value in record.items() if name != "prompt"}
        return {**record, "prompt": [{"role": "user", "content": record["prompt"]}]}
    if isinstance(record.get("prompt"), list):
        return record | {
            name: [{"role": "assistant", "content": record[name]}]
            for name in ANSWERS
            if isinstance(record.get(name), str)
        }
    return record


def is_dialogue(value: object) -> bool:
    """Whether the value is a list of objects, which may be messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def with_more(messages: list[dict], text: str) -> list[dict]:
    """The messages with this text at the end of the user's last one."""
    place = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    content = messages[place]["content"] or ""
    longer = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*messages[:place], {**messages[place], "content": longer}, *messages[place:][1:]]


def messages_as_texts(
    where: str, record: dict, names: tuple[str, ...], tokenizer, answers: bool
) -> tuple[dict[str, str], tuple[str, ...], dict]:
    """Render the columns `names`, which hold messages, as texts. Returns (the texts; notes on the parts of messages
    that the model is not shown; the prompt's `Row.dialogue`).

    answers: whether answers are learned from. If False, the prompt alone is rendered. The template also gets the column
    `tools` and the content of `chat_template_kwargs`. If the last message of a column `prompt` is the assistant's, the
    answer continues this message.

    Raises: UserError, with place and column, if the template refuses the messages, or if the rendered text lacks the
    message to be answered or a part of the answer to be learned.
    """
    columns = {name: _checked(where, name, record[name]) for name in names}
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{where}, column {names[0]}: found messages, and the tokenizer of "
            f"{getattr(tokenizer, 'name_or_path', None) or 'the model'} has no chat template to make a text of them. "
            "Give --chat_template FILE (docs/data.md has one for any tokenizer), set chat_template in its "
            "tokenizer_config.json, or give texts instead of messages."
        )
    if names == ("messages",):
        context, followed = _last_turn(where, columns["messages"], answers)
    elif names == ("chosen", "rejected"):
        context, followed = _shared_turns(where, columns["chosen"], columns["rejected"])
    else:
        context, followed = columns["prompt"], {name: columns[name] for name in names if name != "prompt"}
    if not context:
        raise UserError(
            f"{where}, column {names[0]}: found no message that an assistant answers. Begin with one of "
            "the user, or take the record out."
        )
    options = _options(where, record)
    begun = context[-1] if names[0] == "prompt" and context[-1]["role"] == "assistant" else None
    asked = {"continue_final_message": True} if begun else {"add_generation_prompt": True}
    place = f"{where}, column {names[0]}"
    prompt = render(tokenizer, context, place, **asked, **options)
    check_text(where, f"{names[0]}, by the chat template", prompt)
    notes = _notes(place, prompt, context, options.get("tools") or [], tokenizer)
    notes += _spelt(tokenizer, "a message", (message["content"] for message in context))
    texts = {"prompt": prompt}
    for name, answer in followed.items() if answers else ():
        placed = f"{where}, column {name if name in names else names[0]}"
        _check_is_answer(placed, answer)
        whole = [*context, *answer]
        if begun:
            content = (begun["content"] or "") + (answer[0]["content"] or "")
            whole = [*context[:-1], {**begun, **answer[0], "content": content}, *answer[1:]]
        dialogue = render(tokenizer, whole, placed, **options)
        _check_begins(placed, dialogue, prompt, tokenizer)
        texts[name] = _answer_text(placed, dialogue, len(prompt), answer, tokenizer)
        notes += _spelt(tokenizer, ANSWER, (message["content"] for message in answer))
        at_once = texts[name].lstrip().startswith((answer[0]["content"] or "").strip())
        if not begun and not at_once and render(tokenizer, context, placed, **options) == prompt:
            notes = (*notes, NO_BEGINNING)
    return texts, tuple(dict.fromkeys(notes)), {"messages": context, "tools": options.get("tools")}


def _checked(where: str, column: str, messages: object) -> list[dict]:
    """The messages, checked. Their roles get the names that templates use. Null values are removed, except a null
    content."""
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{where}, column {column}: found {described(messages)}; needed a list of messages, each with "
            "role and content. Correct the record or take it out."
        )
    found = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{where}, column {column}, message {number}: found {described(message)}; needed an object "
                "with role and content. Correct the record or take it out."
            )
        content = message.get("content")
        kinds = [str(part.get("type")) for part in content if isinstance(part, dict)] if type(content) is list else []
        shown = next((kind for kind in kinds if any(name in kind for name in MEDIA)), None)
        if shown is not None:  # such as image_url
            raise UserError(
                f"{where}, column {column}, message {number}, content: found a part of the type {shown}. {TEXTS_ALONE} "
                "give the message as a string without it."
            )
        if content is not None or not message.get("tool_calls"):
            check_text(where, f"{column}, message {number}, content", content, may_be_blank=True)
        kept = {
            key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])
        }
        found.append({**kept, "role": _role(message), "content": content})
    return found


def _role(message: dict) -> object:
    """The message's role, by the name that templates use."""
    role = message.get("role")
    return ROLES.get(role.lower(), role) if isinstance(role, str) else role


def _last_turn(where: str, messages: list[dict], answers: bool) -> tuple[list[dict], dict[str, list[dict]]]:
    """(the messages before the assistant's last message, {"response": [the assistant's last message]}).

    If answers are not needed and the last message is not the assistant's, all messages are the prompt: (messages, {}).
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if answers and not turns:
        raise UserError(
            f"{where}, column messages: found no message of the assistant, which is what would be learned. "
            "Add one or take the record out."
        )
    if not answers and messages[-1]["role"] != "assistant":
        return messages, {}
    return messages[: turns[-1]], {"response": messages[turns[-1] : turns[-1] + 1]}


def _shared_turns(where: str, chosen: list[dict], rejected: list[dict]) -> tuple[list[dict], dict[str, list[dict]]]:
    """(the messages that both dialogues begin with, {column: its messages from the assistant's message where the two
    dialogues begin to differ})."""

    def same(one: dict, other: dict) -> bool:
        return all(one.get(key) == other.get(key) for key in SAME)

    count = sum(1 for _ in takewhile(lambda two: same(*two), zip(chosen[:-1], rejected[:-1])))
    if count == 0 and chosen[0]["role"] != "assistant":
        raise UserError(
            f"{where}, columns chosen and rejected: they differ in their first message ({described(chosen[0])} and "
            f"{described(rejected[0])}); without a column prompt they are dialogues with the same beginning. Correct "
            "the record or take it out."
        )
    while count > 0 and not chosen[count]["role"] == rejected[count]["role"] == "assistant":
        count -= 1
    return chosen[:count], {"chosen": chosen[count:], "rejected": rejected[count:]}


def _options(where: str, record: dict) -> dict:
    """The further arguments that the record gives to the chat template: `tools`, and the content of
    `chat_template_kwargs`."""
    tools, others = (_parsed(record.get(name)) for name in ("tools", "chat_template_kwargs"))
    options = {}
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise UserError(
                f"{where}, column tools: found {described(tools)}; needed a list of objects (JSON schemas), or that as "
                "a JSON text. Correct the record or take it out."
            )
        options["tools"] = tools
    if others:
        if not isinstance(others, dict) or (wrong := sorted(NOT_THE_TEMPLATES.intersection(others))):
            found = described(others) if not isinstance(others, dict) else ", ".join(wrong)
            raise UserError(
                f"{where}, column chat_template_kwargs: found {found}; needed an object of arguments that the chat "
                "template itself knows, such as enable_thinking. Correct the record or take it out."
            )
        options |= {name: value for name, value in others.items() if value is not None}
    return options


def _parsed(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_is_answer(place: str, answer: list[dict]) -> None:
    if not answer or answer[0]["role"] != "assistant":
        raise UserError(
            f"{place}: found {described(answer)}, which is no answer to the messages before: it does not begin with a "
            "message of the assistant. Correct the record or take it out."
        )
    if answer[-1]["role"] != "assistant":
        raise UserError(
            f"{place}: its last message is of the role {answer[-1]['role']!r}. An answer ends with a message of the "
            "assistant, at whose end it is judged. Leave out what follows that, or take the record out."
        )


def _check_begins(place: str, dialogue: str, prompt: str, tokenizer) -> None:
    """Raise UserError unless the rendered dialogue begins with the rendered prompt."""
    if dialogue.startswith(prompt):
        return
    same = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(prompt, dialogue)))
    asked, made = (quoted(text[max(same - 20, 0) :]) for text in (prompt, dialogue))
    raise UserError(
        f"{place}: the chat template of {getattr(tokenizer, 'name_or_path', None) or 'the model'} asks for an answer "
        f"with {asked} and writes an answer that is there as {made}. Step 3 would begin its answers with "
        "another text than the one learned here. The record is in order. Give prompt and answer as texts that fit "
        f"together, or {OTHER_TEMPLATE} that begins an answer alike in both cases (add_generation_prompt)."
    )


def _answer_text(place: str, dialogue: str, start: int, answer: list[dict], tokenizer) -> str:
    """The text of the answer in a rendered dialogue, up to and including the token at which step 3 stops.

    Raises: UserError if the text lacks a part of the answer.
    """
    lost, end = left_out(dialogue, answer, start)
    if lost:
        _, what, piece = lost[0]
        raise UserError(
            f"{place}: the chat template leaves out {what} of the answer ({quoted(piece)}), which should be "
            f"learned. Give prompt and answer as texts, or {OTHER_TEMPLATE} that keeps it."
        )
    closing = _closing(tokenizer, template_key(tokenizer))
    behind = dialogue.rfind(closing, end) if closing else -1
    return dialogue[start:].rstrip() if behind < 0 else dialogue[start : behind + len(closing)]


def _notes(place: str, prompt: str, context: list[dict], tools: list, tokenizer) -> tuple[str, ...]:
    """Notes on the parts of a prompt that the template leaves out. Raises UserError if the template leaves out the
    message to be answered."""
    lost, _ = left_out(prompt, context)
    notes = []
    for message, what, piece in lost:
        role = message["role"]
        if what == "reasoning":
            notes.append("the chat template leaves out the reasoning of earlier answers")
        elif message is context[-1]:
            raise UserError(
                f"{place}: the chat template leaves out the message that is to be answered, of the role {role!r} "
                f"({quoted(piece)}). Name its role as the template does, or give {OTHER_TEMPLATE}."
            )
        else:
            what = "tool calls" if what == "tool call" else "messages"
            remedy = " or give them as system" if role == "developer" else ""
            notes.append(
                f"the chat template leaves out {what} of the role {role!r}, which no model is shown. Name the role as "
                f"the template does,{remedy} or give {OTHER_TEMPLATE}"
            )
    if any(_end_of(prompt, name, 0) < 0 for name in _tool_names(tools)):
        notes.append(f"the chat template leaves out `tools`, which no model is shown. Give {OTHER_TEMPLATE}")
    opening = _opening(tokenizer)
    if opening and not prompt.startswith(opening):
        notes.append(
            f"messages do not begin with {opening}: the chat template writes none, as apply_chat_template has it; "
            "texts get it from the tokenizer"
        )
    return tuple(dict.fromkeys(notes))


ANSWER = "the answer"


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer, template: str) -> tuple[set[str], re.Pattern]:
    """(the tokens with which an answer ends, a pattern of all that begin, end and pad texts or are the template's)."""
    ends = {tokenizer.eos_token, _closing(tokenizer, template)} - {None, ""}
    usual = {tokenizer.bos_token, tokenizer.pad_token} - {tokenizer.unk_token, None} | ends  # texts may have <unk>
    written = render(tokenizer, list(TURNS)) if tokenizer.chat_template else ""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and str(token) in written}
    return ends, any_of(usual | added)


def any_of(tokens: Iterable[str]) -> re.Pattern:
    """A pattern that finds each of these tokens, the longest where several begin; of none it finds nothing."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _spelt(tokenizer, what: str, texts: Iterable[str | None]) -> tuple[str, ...]:
    """A note for each text in which a special token is followed by further text: the tokenizer makes the token of it.
    what: what the note calls the text."""
    ends, tokens = _special_tokens(tokenizer, template_key(tokenizer))
    return tuple(
        f"the special token {match[0]} is spelt inside {what}"
        f"{', and what follows is learned, though step 3 stops there' * (what == ANSWER and match[0] in ends)}. "
        "Where it is not meant to be the token, take it out, or write it with a blank in it"
        for match in (tokens.search(text or "") for text in texts)
        if match and tokens.sub("", match.string[match.end() :]).strip()
    )


def _notes_on_texts(texts: dict[str, str], tokenizer) -> tuple[str, ...]:
    """Notes on a record's answers. Its prompt or text may be one that a chat template made, with special tokens."""
    prompt, answers = texts.get("prompt", "").strip(), [text for name, text in texts.items() if name in ANSWERS]
    repeated = (REPEATED,) if prompt and any(text.lstrip().startswith(prompt) for text in answers) else ()
    return tuple(dict.fromkeys((*_spelt(tokenizer, ANSWER, answers), *repeated)))


def _tool_names(tools: list[dict]) -> list[str]:
    functions = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]
    return [name for function in functions if isinstance(name := function.get("name"), str) and name]


def left_out(text: str, messages: list[dict], start: int = 0) -> tuple[list[tuple[dict, str, str]], int]:
    """Look for the parts of the messages in a rendered text. Returns ([(message, name of the part, text of the part)]
    for each part that the rendered text lacks; the position after the last part that was found).

    The messages of users, assistants and tools must occur in their order. Other messages may occur anywhere: some
    templates write the system message into the last question.
    """
    lost, end = [], start
    for message in messages:
        begin, in_order = end, message["role"] in ("user", "assistant", "tool")
        for what, piece in _pieces(message):
            behind = _end_of(text, piece, begin if in_order else start)
            if behind < 0:
                lost.append((message, what, piece))
            elif in_order:
                end = max(end, behind)
    return lost, end


def _pieces(message: dict) -> Iterator[tuple[str, str]]:
    """(name, text without surrounding blanks) of each part of a message that the rendered text must contain."""
    content = message["content"] or ""
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            yield "reasoning", message[key].strip()
            break
    *thoughts, said = content.split("</think>")
    for kind, part in [*(("reasoning", thought) for thought in thoughts), ("the text", said)]:
        yield from ((kind, piece.strip()) for piece in part.split("<think>") if piece.strip())
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        parts = (function.get("name"), function.get("arguments"))
        yield from (("tool call", part if isinstance(part, str) else json.dumps(part)) for part in parts if part)


def _end_of(text: str, value: object, start: int) -> int:
    """The end of the first occurrence of a value in the text from `start` on; -1 if the value does not occur.

    A value that is a text may occur as it is, escaped as in JSON once or twice, or with other blanks between its words.
    If the value is an object, or a text that is JSON, each text within it must occur, in any order; the numbers within
    it are not looked for.
    """
    if isinstance(value, str):
        forms = [value.strip()]
        for ascii_only in (False, True):
            once = json.dumps(forms[0], ensure_ascii=ascii_only)[1:-1]
            forms += [once, json.dumps(once, ensure_ascii=ascii_only)[1:-1]]
        for form in forms:
            if (found := text.find(form, start)) >= 0:
                return found + len(form)
        if spaced := re.compile(r"\s+".join(map(re.escape, value.split()))).search(text, start):
            return spaced.end()
        value = _parsed(value) if forms[0][:1] in ("{", "[") else None
        if not isinstance(value, (dict, list)):
            return -1
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ends = [_end_of(text, one, start) for one in inner if isinstance(one, (str, dict, list))]
    return -1 if -1 in ends else max(ends, default=start)


@functools.lru_cache(maxsize=8)
def _closing(tokenizer, template: str) -> str:
    """The text of the token with which the template ends a turn; "" if there is no such token."""
    token = end_of_turn(tokenizer)
    return "" if token is None else tokenizer.convert_ids_to_tokens(token)


@functools.lru_cache(maxsize=8)
def _opening(tokenizer) -> str:
    """The text of the tokens that the tokenizer adds at the beginning of each text, such as BOS."""
    return "".join(tokenizer.convert_ids_to_tokens(opening_tokens(tokenizer)))
