"""Forms: how a record is checked and becomes a row, the texts that a step reads.

    SFT.row(where, {"prompt": "Hi", "chosen": " Hello."}, tokenizer)        # {"prompt": "Hi", "response": " Hello."}

Messages become texts through the tokenizer's chat template. Whichever step reads a record, its prompt is the same text.
"""

import os.path
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import UserError
from training.data.messages import messages_as_texts, messages_on_both_sides
from training.data.records import check_text, described, shortened

Columns = tuple[tuple[str, ...], ...]  # alternatives, each the columns that a record needs to have

TURN = "\n\nAssistant:"  # with which an answer begins in dialogues that are written as one text, like Anthropic/hh-rlhf
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
        record = messages_on_both_sides(record) if isinstance(record, dict) else record
        names = matching_columns(where, record, self.columns)
        if names == ("messages",) or any(isinstance(record[name], list) for name in names if name != "text"):
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
    return {"prompt": texts["prompt"], "response": texts.get("chosen") or texts.get("response", "")}


# chosen before response: sets like Dahoas/rm-static have both, and chosen is the better one of their pair
SFT = Form(
    "text",
    (("messages",), ("prompt", "chosen"), ("prompt", "response"), ("chosen", "rejected"), ("text",)),
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
