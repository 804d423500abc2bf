"""Formats sampled responses: as plain text for a terminal, and as a Markdown table for TensorBoard.

    rows = [{"prompt": "The film was", "response": " good.\n", "score": 1.25, "kl": 0.5}]
    print(samples_text(rows))
    tensorboard.text(step, "samples", samples_markdown(rows))

A response may contain anything, also terminal escape sequences and HTML. They are escaped, so that the terminal and the
browser show them as text. If a row has no score or KL (None, or no such key), its cell is empty. If a row has turns
(`evaluation.turns_of`), they are shown one by one, each behind the name of who said it, instead of the response.
"""

from collections.abc import Mapping, Sequence

from training.runtime.environment import visible

LONGEST = 400  # characters of a text in a terminal
MARKDOWN_MEANING = "&<>|`*_[]\\~"


def samples_text(rows: Sequence[Mapping]) -> str:
    """Plain text with a line for each sample's numbers, its prompt and its response, or each of its turns. Long prompts
    lose their beginning, which is farthest from the response; long responses and turns lose their end."""
    lines = []
    for row in rows:
        prompt = visible(row["prompt"])
        said = [("prompt", prompt if len(prompt) <= LONGEST else f"...{prompt[-LONGEST:]}")]
        for name, text, reward in _said(row):
            text = visible(text)
            said.append((name, text if len(text) <= LONGEST else f"{text[:LONGEST]}..."))
            said += [("reward", reward)] if reward else []
        lines.append(f"score {_number(row.get('score'))}, KL {_number(row.get('kl'))}")
        width = max(8, *(len(name) for name, _ in said))
        lines += [f"  {name:<{width}} {text}" for name, text in said]
    return "\n".join(line.rstrip() for line in lines)


def _said(row: Mapping) -> list[tuple[str, str, str]]:
    """(who said it, text, reward or "") of each turn of a sample; of a sample without turns its response."""
    if not row.get("turns"):
        return [("response", row["response"], "")]
    return [(turn["by"], turn["text"], _number(turn.get("reward"))) for turn in row["turns"]]


def samples_markdown(rows: Sequence[Mapping]) -> str:
    """A Markdown table with the whole texts. A newline is shown as \\n and also breaks the line within the cell.

    TensorBoard gives long texts all the width, and breaks words and numbers at any place; only <pre> prevents this.
    """
    lines = [f"| {_unbroken('score')} | {_unbroken('kl')} | prompt | response |", "| --: | --: | :-- | :-- |"]
    for row in rows:
        cells = [
            _unbroken(_number(row.get("score"))),
            _unbroken(_number(row.get("kl"))),
            _escape_markdown(row["prompt"]),
            _response_markdown(row),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _response_markdown(row: Mapping) -> str:
    """The response, or its turns, each behind a name in bold, which no text can be."""
    if not row.get("turns"):
        return _escape_markdown(row["response"])
    return "<br>".join(
        f"**{name}{f', reward {reward}' if reward else ''}:** {_escape_markdown(text)}"
        for name, text, reward in _said(row)
    )


def _unbroken(text: str) -> str:
    return f"<pre>{text}</pre>" if text else ""


def _escape_markdown(text: str) -> str:
    lines = (
        "".join(f"&#{ord(char)};" if char in MARKDOWN_MEANING else char for char in visible(line))
        for line in text.split("\n")
    )
    return "&#92;n<br>".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
