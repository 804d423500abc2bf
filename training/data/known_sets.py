"""Well-known data sets whose columns have names of their own, or whose prompts lack the words around them.

What is done to their rows is what DeepSpeed-Chat does, so that its recipes train on the same texts. Null stays null.
"""

from collections.abc import Callable

Change = Callable[[dict], dict]


def _dialogue(row: dict, prompt: str, **answers: str) -> dict:
    """A question and its answers, given as names of columns, as the texts of a dialogue."""
    texts = {name: _around(" ", row[column]) for name, column in answers.items()}
    return {**row, "prompt": _around(" Human: ", row[prompt], " Assistant:"), **texts}


def _around(before: str, text: str | None, after: str = "") -> str | None:
    return before + text + after if isinstance(text, str) else text


def _spaced(row: dict) -> dict:
    return row | {name: _around(" ", row[name]) for name in ("prompt", "chosen", "rejected") if name in row}


def _shp(row: dict) -> dict:
    better, worse = ("A", "B") if row["labels"] == 1 else ("B", "A")
    return _dialogue(row, "history", chosen=f"human_ref_{better}", rejected=f"human_ref_{worse}")


def _yitingxie(row: dict) -> dict:
    answers = {name: row[name].split("Assistant:")[-1] for name in ("chosen", "rejected")}
    return {**row, "prompt": row["prompt"] + "Assistant:", **answers}


CHANGES: dict[str, Change] = {
    "local/jsonfile": _spaced,
    "Dahoas/synthetic-instruct-gptj-pairwise": lambda row: _dialogue(
        row, "prompt", chosen="chosen", rejected="rejected"
    ),
    "stanfordnlp/SHP": _shp,
    "wangrui6/Zhihu-KOL": lambda row: _dialogue(row, "INSTRUCTION", response="RESPONSE"),
    "yitingxie/rlhf-reward-datasets": _yitingxie,
}


def changes_of(name: str) -> Change | None:
    """What is done to the rows of the data set of this name, or of a local copy whose path ends so, if anything."""
    return next((change for known, change in CHANGES.items() if f"/{name.rstrip('/')}".endswith(f"/{known}")), None)
