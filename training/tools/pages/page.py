"""Parts of HTML pages: a document in one file, tables, and a list of samples side by side.

    data = {"samples": sample_data(samples)}
    text = document("sft beside base", "256 prompts", sample_section(samples), data, ["samples.js"])

The page's content security policy forbids all requests, and all scripts but the page's own. Texts of models are in the
page as JSON, which a script shows as text, never as markup.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {style}; style-src-attr 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)
LONE_SURROGATES = re.compile("[\ud800-\udfff]")  # characters that UTF-8 lacks; names of files may have them
BREAKS = re.compile("(?<=[_/-])")  # where a line of a table's head may end, besides spaces
COLOURS = 8  # colours in style.css, --c0 to --c7
ORDERS = {
    "change": "largest changes",
    "gain": "largest gains",
    "loss": "largest losses",
    "score": "highest scores",
    "kl": "largest KL",
    "length": "longest",
    "prompt": "as in the data",
}
KINDS = {"all": "gains, losses and ties", "gain": "gains", "loss": "losses", "tie": "ties"}


def document(title: str, intro: str, body: str, data: Mapping[str, object], scripts: Sequence[str]) -> str:
    """The page as one HTML file.

    title, intro: plain texts. body: markup. data: {id of an element: its content, which becomes JSON for the scripts}.
    scripts: names of files in this folder.
    """
    blocks = "".join(
        f'<script type="application/json" id="{name}">{_json(each)}</script>' for name, each in data.items()
    )
    style, *codes = ((HERE / name).read_text(encoding="utf-8") for name in ("style.css", *scripts))
    code = "".join(f"<script>{each}</script>" for each in codes)
    policy = POLICY.format(scripts=" ".join(map(sha256, codes)) or "'none'", style=sha256(style))
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="soft">{escape(intro)}</p>
</header>
<main>
{body}
</main>
{blocks}
{code}
</body>
</html>
"""
    return LONE_SURROGATES.sub("\ufffd", text)


def sha256(text: str) -> str:
    """The hash of a script or style element's content, as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(content: object) -> str:
    """JSON for a script element: without "<", and with null for numbers that are not finite."""
    return json.dumps(_finite(content), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _finite(content):
    if isinstance(content, float):
        return content if abs(content) < float("inf") else None
    if isinstance(content, Mapping):
        return {name: _finite(each) for name, each in content.items()}
    return [_finite(each) for each in content] if isinstance(content, list | tuple) else content


def dot(name: str, place: int) -> str:
    """Markup of a name, preceded by a dot in the colour of the model or run."""
    return f'<span class="dot" style="--c: {colour(place)}" aria-hidden="true"></span>{escape(name)}'


def colour(place: int) -> str:
    """The CSS colour of the model or run with this number on the page."""
    return f"var(--c{place % COLOURS})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Markup of a table. Cells are markup; the head and the caption are plain texts."""
    heads = "".join(f'<th scope="col">{BREAKS.sub("<wbr>", escape(cell))}</th>' for cell in head)
    lines = [f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows]
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f'<caption class="hidden">{escape(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a text table: the first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Response:
    """A response as samples.js shows it. scores, changes: one number for each reward. A change is this score minus that
    of the row's first response, or of another one that the page names; None if there is none. kl: None if no policies
    are compared. turns: those of a conversation, as in `evaluation.turns_of`."""

    text: str
    scores: Sequence[float]
    kl: float | None
    tokens: int
    ended: bool
    changes: Sequence[float | None]
    turns: Sequence[Mapping] = ()


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Responses to one prompt side by side. place: the prompt's number. number: the sample's number among those of this
    prompt."""

    prompt: str
    place: int
    number: int
    responses: Sequence[Response]


@dataclass(frozen=True, slots=True)
class Samples:
    """names: the columns; words that differ from the first column are marked. rewards: names of the rewards. each:
    number of samples of a prompt. elsewhere: a file with the samples, for readers without JavaScript."""

    names: Sequence[str]
    rewards: Sequence[str]
    each: int
    rows: Sequence[SampleRow]
    elsewhere: str


def sample_data(samples: Samples) -> dict:
    """The samples as the JSON that samples.js reads."""
    rows = [
        {
            "prompt": row.prompt,
            "place": row.place,
            "number": row.number,
            "responses": [
                [
                    each.text,
                    [round(score, 6) for score in each.scores],
                    each.kl if each.kl is None else round(each.kl, 4),
                    each.tokens,
                    each.ended,
                    [change if change is None else round(change, 6) for change in each.changes],
                    *([each.turns] if each.turns else []),
                ]
                for each in row.responses
            ],
        }
        for row in samples.rows
    ]
    return {"names": list(samples.names), "rewards": list(samples.rewards), "each": samples.each, "rows": rows}


def sample_section(samples: Samples) -> str:
    """Markup of the list of samples with search, filters and pages; samples.js fills it."""
    first, *others = samples.names
    models = {"any": "all", **{str(place): name for place, name in enumerate(others, 1)}}
    rewards = {str(place): name for place, name in enumerate(samples.rewards)}
    measured = any(each.kl is not None for row in samples.rows for each in row.responses)
    orders = {name: text for name, text in ORDERS.items() if measured or name != "kl"}
    nav = (
        '<nav aria-label="{}"><button type="button" data-go="-1">previous</button>'
        '<button type="button" data-go="1">next</button><span id="{}" {}></span></nav>'
    )
    return f"""<section id="list-of-samples">
<h2>Samples</h2>
<p class="soft">Words that differ from {escape(first)} are <mark>marked</mark>. If one other column is chosen, words
that only the first column has are <mark class="gone">marked</mark> too. Keys: / searches, j and k go from sample to
sample, n and p from page to page.</p>
<form id="controls" role="search" aria-label="samples">
<label>search prompts and responses<input id="search" type="search" autocomplete="off"></label>
{_select("model", f"beside {first}", models)}
{_select("kind", "show", KINDS)}
{_select("reward", "by reward", rewards)}
<label>change of at least<input id="least" type="number" min="0" step="any" value="0"></label>
{_select("order", "order", orders)}
</form>
{nav.format("pages", "told", 'role="status" aria-live="polite"')}
<div id="list"></div>
{nav.format("pages, below", "told-below", "")}
<noscript>The samples need JavaScript. {escape(samples.elsewhere)} has the same.</noscript>
</section>"""


def _select(name: str, label: str, options: Mapping[str, str]) -> str:
    inner = "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options.items())
    return f'<label>{escape(label)}<select id="{name}">{inner}</select></label>'
