"""Formats sampled responses as tables: plain text for a terminal, Markdown for TensorBoard.

    rows = [{"prompt": "The film was", "response": " good.\n", "score": 1.25, "kl": 0.5}]
    print(samples_table(rows, width=100))
    tensorboard.text(step, "samples", samples_markdown(rows))

A response may contain anything, also terminal escape sequences and HTML. They are escaped, so that the terminal and the
browser show them as text. If a row has no score or KL (None, or no such key), its cell is empty.
"""

import itertools
import unicodedata
from collections.abc import Mapping, Sequence

from training.runtime.environment import visible

MAX_LINES = 4
"""The largest number of text lines in a row of the terminal's table; longer texts are cut."""
GAP = "  "
NUMBER_WIDTH = 9
MIN_WIDTH = 48

MARKDOWN_MEANING = "&<>|`*_[]\\~"


def samples_table(rows: Sequence[Mapping], width: int) -> str:
    """A plain-text table that is at most `width` columns wide. Long prompts lose their beginning, which is farthest
    from the response; long responses lose their end."""
    assert width >= MIN_WIDTH, f"a table of samples needs {MIN_WIDTH} columns, not {width}"
    text_width = width - 2 * (len(GAP) + NUMBER_WIDTH) - len(GAP)
    prompt_width = text_width * 2 // 5
    widths = [prompt_width, text_width - prompt_width]
    rules = ["-" * columns for columns in (*widths, NUMBER_WIDTH, NUMBER_WIDTH)]
    lines = [_line(["prompt", "response", "score", "kl"], widths), _line(rules, widths)]
    for row in rows:
        prompt = _cut(_wrap(visible(row["prompt"]), widths[0]), widths[0], start=True)
        response = _cut(_wrap(visible(row["response"]), widths[1]), widths[1], start=False)
        columns = (prompt or [""], response, [_number(row.get("score"))], [_number(row.get("kl"))])
        lines += [_line(cells, widths) for cells in itertools.zip_longest(*columns, fillvalue="")]
    return "\n".join(lines)


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


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One line of the table. The two texts are aligned to the left of their columns, the two numbers to the right."""
    texts = [cell + " " * (width - _columns(cell)) for cell, width in zip(cells, widths)]
    return GAP.join(texts + [cell.rjust(NUMBER_WIDTH) for cell in cells[2:]]).rstrip()


def _columns(text: str) -> int:
    """The number of columns that `text` takes in a terminal: 2 for a wide character, 0 for a combining mark."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _wrap(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` columns. A line is broken after a space if it has one.

    The spaces at the breaks stay, since they are part of what the model wrote.
    """
    lines, line = [], ""
    for char in text:
        while _columns(line + char) > width:
            end = line.rfind(" ") + 1 or len(line)
            lines.append(line[:end])
            line = line[end:]
        line += char
    return lines + [line] if line else lines


def _cut(lines: list[str], width: int, start: bool) -> list[str]:
    """At most MAX_LINES of the lines; "..." marks where lines were cut. start: whether the first lines are cut; if not,
    the last ones are."""
    if len(lines) <= MAX_LINES:
        return lines
    kept = lines[-MAX_LINES:] if start else lines[:MAX_LINES]
    edge = kept[0] if start else kept[-1]
    while _columns(edge) > width - 3:
        edge = edge[1:] if start else edge[:-1]
    return [f"...{edge}", *kept[1:]] if start else [*kept[:-1], f"{edge}..."]
