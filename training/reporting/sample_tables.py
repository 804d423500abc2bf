"""Formats sampled responses: as plain text for a terminal, and as a Markdown table for TensorBoard.

    rows = [{"prompt": "The film was", "response": " good.\n", "score": 1.25, "kl": 0.5}]
    print(samples_text(rows))
    tensorboard.text(step, "samples", samples_markdown(rows))

A response may contain anything, also terminal escape sequences and HTML. They are escaped, so that the terminal and the
browser show them as text. If a row has no score or KL (None, or no such key), its cell is empty.
"""

from collections.abc import Mapping, Sequence

from training.runtime.environment import visible

LONGEST = 400  # characters of a text in a terminal
MARKDOWN_MEANING = "&<>|`*_[]\\~"


def samples_text(rows: Sequence[Mapping]) -> str:
    """Plain text with three lines for each sample. Long prompts lose their beginning, which is farthest from the
    response; long responses lose their end."""
    lines = []
    for row in rows:
        prompt, response = visible(row["prompt"]), visible(row["response"])
        prompt = prompt if len(prompt) <= LONGEST else f"...{prompt[-LONGEST:]}"
        response = response if len(response) <= LONGEST else f"{response[:LONGEST]}..."
        lines.append(f"score {_number(row.get('score'))}, KL {_number(row.get('kl'))}")
        lines += [f"  prompt   {prompt}", f"  response {response}"]
    return "\n".join(line.rstrip() for line in lines)


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
            _escape_markdown(row["response"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
