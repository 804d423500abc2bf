"""Forms: how a record is checked and becomes a row, the texts that a step reads.

    SFT.row(where, {"prompt": "Hi", "chosen": " Hello."}, tokenizer)        # {"prompt": "Hi", "response": " Hello."}

Messages become texts through the tokenizer's chat template. Whichever step reads a record, its prompt is the same text.
"""

import os.path
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from engine.errors import UserError
from training.data.chat import render
from training.data.records import described, shortened

Columns = tuple[tuple[str, ...], ...]  # alternatives, each the columns that a record needs to have

TURN = "\n\nAssistant:"  # with which an answer begins in dialogues that are written as one text, like Anthropic/hh-rlhf
ANSWERS = ("chosen", "rejected", "response")
LONGEST_TEXT = 10_000_000  # characters; tokenizers take 20 seconds for as many, and minutes and all memory for more
DEEPEST = 100  # lists within lists; Python reads some 900, and fewer where it is in the middle of something


@dataclass(frozen=True, slots=True)
class Form:
    """How one step reads records.

    name: of the form; part of the rows' fingerprint. columns: the first alternative that a record has is read.
    shape: makes the row of (record, the texts of these columns). may_be_blank: whether texts may be blank.
    ends_with_answer: messages are read up to the assistant's last one, not to their end.
    """

    name: str
    columns: Columns
    shape: Callable[[dict, dict[str, str]], dict]
    may_be_blank: bool = False
    ends_with_answer: bool = False

    def row(self, where: str, record: object, tokenizer) -> dict:
        """The row of a record, whose place is `where`. Messages need a tokenizer with a chat template; texts need none.

        Raises UserError, with the place and the column, for a record that has none of the alternatives, or whose texts
        are none that a tokenizer takes.
        """
        _check_depth(where, record)
        record = _with_messages(record) if isinstance(record, dict) else record
        names = matching_columns(where, record, self.columns)
        if names == ("messages",) or any(isinstance(record[name], list) for name in names if name != "text"):
            texts = _rendered(where, record, names, tokenizer, self.ends_with_answer)
        elif names == ("chosen", "rejected"):
            texts = _split_dialogues(where, record)
        else:
            texts = {name: record[name] for name in names}
            for name, text in texts.items():
                check_text(where, name, text, self.may_be_blank or (name == "prompt" and len(names) > 1))
        return self.shape(record, texts)


def _sft_row(record: dict, texts: dict[str, str]) -> dict:
    if "text" in texts:
        return texts
    return {"prompt": texts["prompt"], "response": texts.get("chosen") or texts.get("response", "")}


# chosen before response: sets like Dahoas/rm-static have both, and chosen is the better one of their pair
SFT = Form(
    "text",
    (("messages",), ("prompt", "chosen"), ("prompt", "response"), ("chosen", "rejected"), ("text",)),
    _sft_row,
    ends_with_answer=True,
)
PAIRS = Form("pair", (("prompt", "chosen", "rejected"), ("chosen", "rejected")), lambda record, texts: texts)
PROMPTS = Form(
    "prompt",
    (("messages",), ("prompt",), ("chosen", "rejected")),
    lambda record, texts: {**record, "prompt": texts["prompt"]},
)

TEXTS = Form("pretraining text", (("text",),), lambda record, texts: texts, may_be_blank=True)  # sets have empty lines


def matching_columns(where: str, record: object, columns: Columns) -> tuple[str, ...]:
    """The first alternative whose columns the record has (null counts as absent); raises UserError if it has none."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: found {described(record)}; a record is an object with {alternatives(columns)}.")
    present = {name for name, value in record.items() if value is not None}
    wanted = next((names for names in columns if present.issuperset(names)), None)
    if wanted is None:
        found = ", ".join(name if name in present else f"{name} (null)" for name in record) or "none"
        raise UserError(
            f"{where}: found the columns: {shortened(found, 400)[1:-1]}; needed: {alternatives(columns)}. "
            "Rename or add them."
        )
    return wanted


def alternatives(columns: Columns) -> str:
    """The alternatives in words, for a message."""
    return ", or ".join(" + ".join(names) for names in columns)


def _check_depth(where: str, record: object) -> None:
    """Raise UserError for JSON that would later be too deep to be written into a message or read from the cache."""
    level = [record] if isinstance(record, (dict, list)) else []
    for _ in range(DEEPEST):
        values = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [value for value in values if isinstance(value, (dict, list))]
        if not level:
            return
    raise UserError(f"{where}: found more than {DEEPEST} lists within lists. Mend the record or take it out.")


def check_text(where: str, column: str, value: object, may_be_blank: bool = False) -> None:
    """Raise UserError, with the place and the column, unless the value is a text that a tokenizer takes."""
    problem = None
    if not isinstance(value, str):
        problem = f"found {described(value)}; needed a string"
    elif not value.strip() and not may_be_blank:
        problem = f"found {shortened(value)}; needed a text that is not blank"
    elif len(value) > LONGEST_TEXT:
        problem = f"found {len(value):,} characters; needed at most {LONGEST_TEXT:,}"
    elif "\0" in value:
        problem = f"found a NUL character in {shortened(value)}; needed a text without it"
    elif re.search("[\ud800-\udfff]", value):
        problem = f"found half a surrogate pair in {shortened(value)}; needed complete characters"
    if problem:
        raise UserError(f"{where}, column {column}: {problem}. Mend the record or take it out.")


def _split_dialogues(where: str, record: dict) -> dict[str, str]:
    """prompt, chosen and rejected of two dialogues written as texts.

    The prompt is what both begin with, up to the last `TURN` in it. An answer may be empty, as in some real dialogues.
    """
    for name in ("chosen", "rejected"):
        check_text(where, name, record[name])
    shared = os.path.commonprefix([record["chosen"], record["rejected"]])
    end = shared.rfind(TURN) + len(TURN)
    if end < len(TURN):
        raise UserError(
            f"{where}, columns chosen and rejected: found no {TURN!r} in what both begin with; without a "
            f"column prompt they are dialogues with the same beginning, which ends with {TURN!r}. Add a "
            "column prompt, or take the record out."
        )
    return {"prompt": shared[:end], "chosen": record["chosen"][end:], "rejected": record["rejected"][end:]}


def _with_messages(record: dict) -> dict:
    """The record with messages on both sides where one side has them.

    A text beside messages becomes one message: a prompt the user's, an answer the assistant's. Where the answers are
    dialogues from their beginning, which hold the prompt, a prompt given as text is left out.
    """
    listed = [record[name] for name in ANSWERS if isinstance(record.get(name), list)]
    if listed and isinstance(record.get("prompt"), str):
        begins = [messages[0].get("role") for messages in listed if messages and isinstance(messages[0], dict)]
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


def _rendered(where: str, record: dict, names: tuple[str, ...], tokenizer, ends_with_answer: bool) -> dict[str, str]:
    """The texts of columns that hold messages."""
    for name in names:
        _check_messages(where, name, record[name])
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{where}, column {names[0]}: found messages, and the tokenizer of "
            f"{getattr(tokenizer, 'name_or_path', None) or 'the model'} has no chat template to make a text of them. "
            "Set chat_template in its tokenizer_config.json, or give texts instead of messages."
        )
    if names == ("messages",):
        context, answers = _last_turn(where, record["messages"], ends_with_answer)
    elif names == ("chosen", "rejected"):
        context, answers = _shared_turns(record["chosen"], record["rejected"])
    else:
        context, answers = record["prompt"], {name: record[name] for name in names if name != "prompt"}
    if not context:
        raise UserError(
            f"{where}, column {names[0]}: found no message that an assistant answers. Begin with one of "
            "the user, or take the record out."
        )
    prompt = render(tokenizer, context, f"{where}, column {names[0]}", add_generation_prompt=True)
    check_text(where, f"{names[0]}, by the chat template", prompt)
    texts = {"prompt": prompt}
    for name, answer in answers.items():
        dialogue = render(tokenizer, context + answer, f"{where}, column {name if name in names else names[0]}")
        if not answer or answer[0]["role"] != "assistant" or not dialogue.startswith(prompt):
            raise UserError(
                f"{where}, column {name if name in names else names[0]}: found {described(answer)}, which "
                "by the chat template is no answer to the messages before. An answer is a message of the "
                "assistant, and the template has to begin it as it asks for one (add_generation_prompt)."
            )
        texts[name] = dialogue[len(prompt) :].rstrip()  # some templates write a line break behind the end of a turn
    return texts


def _last_turn(where: str, messages: list[dict], ends_with_answer: bool) -> tuple[list[dict], dict[str, list[dict]]]:
    """(the messages before the assistant's last one, {"response": [that one]}).

    Where the last message is not the assistant's and need not be: (all messages, {}), for it is still to be answered.
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if ends_with_answer and not turns:
        raise UserError(
            f"{where}, column messages: found no message of the assistant, which is what would be learned. "
            "Add one or take the record out."
        )
    if not ends_with_answer and messages[-1]["role"] != "assistant":
        return messages, {}
    return messages[: turns[-1]], {"response": messages[turns[-1] : turns[-1] + 1]}


def _shared_turns(chosen: list[dict], rejected: list[dict]) -> tuple[list[dict], dict[str, list[dict]]]:
    """(the messages that both begin with, up to the assistant's in which they differ, {column: those that follow})."""
    count = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(chosen[:-1], rejected[:-1])))
    while count > 0 and not chosen[count]["role"] == rejected[count]["role"] == "assistant":
        count -= 1
    return chosen[:count], {"chosen": chosen[count:], "rejected": rejected[count:]}


def _check_messages(where: str, column: str, messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{where}, column {column}: found {described(messages)}; needed a list of messages, each with "
            "role and content. Mend the record or take it out."
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{where}, column {column}, message {number}: found {described(message)}; needed an object "
                "with role and content. Mend the record or take it out."
            )
        check_text(where, f"{column}, message {number}, content", message.get("content"), may_be_blank=True)
