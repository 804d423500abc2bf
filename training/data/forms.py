"""Forms: how a record is checked and becomes a row, the texts that a step reads.

    SFT.row(where, {"prompt": "Hi", "chosen": " Hello."}, tokenizer)        # {"prompt": "Hi", "response": " Hello."}

Messages become texts through the tokenizer's chat template. Whichever step reads a record, its prompt is the same text.
"""

import os.path
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UserError
from training.data.messages import ANSWERS, is_dialogue, messages_as_texts, messages_on_both_sides
from training.data.records import check_text, described, shortened

Columns = tuple[tuple[str, ...], ...]  # alternatives, each the columns that a record needs to have

TURN = "\n\nAssistant:"  # with which an answer begins in dialogues that are written as one text, like Anthropic/hh-rlhf
# A record `r` with alpaca's columns, or dolly's, as one with our own: in Python, for a command that a message shows.
ALPACA = (
    r'{**r, "prompt": [{"role": "user", "content": "\n\n".join(filter(None, [r["instruction"], r.get("input"), '
    'r.get("context")]))}], "response": r.get("output") or r.get("response")}'
)
DEEPEST = 100  # lists within lists; Python reads some 900, and fewer where it is in the middle of something


class Row(dict):
    """The checked texts of a record; `notes` say what of its messages a model is not shown."""

    def __init__(self, texts: dict, notes: tuple[str, ...] = ()):
        super().__init__(texts)
        self.notes = notes


@dataclass(frozen=True, slots=True)
class Form:
    """How one step reads records.

    name: of the form; part of the rows' fingerprint. columns: the first alternative that a record has is read.
    shape: makes the row of (record, the texts of these columns). may_be_blank: whether texts may be blank.
    answers: whether answers are read, and messages up to the assistant's last one; otherwise prompts alone.
    """

    name: str
    columns: Columns
    shape: Callable[[dict, dict[str, str]], dict]
    may_be_blank: bool = False
    answers: bool = True

    def row(self, where: str, record: object, tokenizer) -> Row:
        """The row of a record, whose place is `where`. Messages need a tokenizer with a chat template; texts need none.

        Raises UserError, with the place and the column, for a record that has none of the alternatives, or whose texts
        are none that a tokenizer takes.
        """
        _check_depth(where, record)
        record = messages_on_both_sides(_from_share_gpt(record)) if isinstance(record, dict) else record
        names = matching_columns(where, record, self.columns)
        if "completion" in names and isinstance(record.get("label"), bool):
            raise UserError(
                f"{where}: found the column label ({record['label']}) beside prompt and completion: by "
                "TRL's form for unpaired preferences it says whether the completion is good, and all completions would "
                "be learned. Keep the records whose completion is good, and take the column label out."
            )
        if names == ("messages",) or any(is_dialogue(record[name]) for name in names if name != "text"):
            texts, notes = messages_as_texts(where, record, names, tokenizer, self.answers)
            return Row(self.shape(record, texts), notes)
        if names == ("chosen", "rejected"):
            texts = _split_dialogues(where, record)
        else:
            texts = {name: record[name] for name in names}
            for name, text in texts.items():
                check_text(where, name, text, self.may_be_blank or (name == "prompt" and len(names) > 1))
        return Row(self.shape(record, texts))


def _sft_row(record: dict, texts: dict[str, str]) -> dict:
    if "text" in texts:
        return texts
    answer = next(texts[name] for name in ("chosen", "response", "completion") if name in texts)
    return {"prompt": texts["prompt"], "response": answer}


# chosen before response: sets like Dahoas/rm-static have both, and chosen is the better one of their pair
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
PROMPTS = Form(
    "prompt",
    (("messages",), ("prompt",), ("chosen", "rejected")),
    lambda record, texts: {**record, "prompt": texts["prompt"]},
    answers=False,
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
            f"{_remedy(where, record, columns)}"
        )
    return wanted


def alternatives(columns: Columns) -> str:
    """The alternatives in words, for a message."""
    return ", or ".join(" + ".join(names) for names in columns)


def _remedy(where: str, record: dict, columns: Columns = (), otherwise: str = "Rename or add them.") -> str:
    """What to do with a record whose columns have other names: for two well-known forms a command that does it."""
    if record.get("instruction") is not None:
        if all("rejected" in names for names in columns) and record.get("rejected") is None:
            return "It has an answer and none that is worse: from such records step 1 learns."
        return (
            "How an instruction becomes a prompt is yours to choose. As a user's message, with its input below it, for "
            f"which a model without a chat template needs --chat_template FILE: {_conversion(where, ALPACA)}"
        )
    lists = (name for name, value in record.items() if isinstance(value, list) and value and _may_be_record(value[0]))
    name = next(lists, None)
    if name is None:
        return otherwise
    command = _conversion(where, "record", " for record in r[sys.argv[2]]", name)
    return f"{otherwise} If the records are those in {name}, write one a line: {command}"


def _may_be_record(value: object) -> bool:
    return isinstance(value, dict) and "role" not in value and not _is_turn(value)


def _conversion(where: str, row: str, each: str = "", *arguments: str) -> str:
    """A shell command that writes a new .jsonl file: `row`, in Python, of each record `r` of the file or data set."""
    source = re.sub(r"(, split [^,]+)?, (line|record) \d+$", "", where)
    program = (
        "import json, sys; from training.data.sources import open_source; "
        f"[print(json.dumps({row}, default=str)) for part in open_source(sys.argv[1]).training for _, r in part{each}]"
    )
    new = Path(source).name.split(".")[0] + "-converted.jsonl"
    return " ".join(["python -c", *map(shlex.quote, (program, source, *arguments)), ">", shlex.quote(new)])


def _check_depth(where: str, record: object) -> None:
    """Raise UserError for JSON that would later be too deep to be written into a message or read from the cache."""
    level = [record] if isinstance(record, (dict, list)) else []
    for _ in range(DEEPEST):
        values = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [value for value in values if isinstance(value, (dict, list))]
        if not level:
            return
    raise UserError(f"{where}: found more than {DEEPEST} lists within lists. Mend the record or take it out.")


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
            f"column prompt they are dialogues with the same beginning, which ends with {TURN!r}. "
            + _remedy(where, record, otherwise="Add a column prompt, or take the record out.")
        )
    return {"prompt": shared[:end], "chosen": record["chosen"][end:], "rejected": record["rejected"][end:]}


def _from_share_gpt(record: dict) -> dict:
    """The record with ShareGPT's turns, {"from", "value"}, as messages, behind the text of its `system` if it has one.

    Its `conversations` are the `messages`; or the `prompt` where `chosen` and `rejected` are a turn each. A record with
    another column that says what is asked keeps its `conversations`.
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
    """A list of ShareGPT's turns, or one of them, as messages; anything else as it is."""
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        return value
    return [{"role": turn["from"], "content": turn["value"]} for turn in turns]


def _is_turn(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("from"), str) and "value" in value
