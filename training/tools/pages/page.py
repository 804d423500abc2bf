"""The parts of a page: a document in a single file, tables, and a list of samples side by side.

    text = document("sft beside base", "256 prompts", samples(shown), {"samples": sample_data(shown)}, ["samples.js"])

Its policy (CSP) forbids any request, and any script but the page's own. What models say reaches the browser as JSON and
then as text, never as markup.
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
LONE_SURROGATES = re.compile("[\ud800-\udfff]")  # of names that are no text: UTF-8 has none
COLOURS = 8  # of style.css, --c0 to --c7
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
    """The whole file.

    title, intro: texts. body: markup. data: JSON by the id of its element, which scripts read. scripts: files of this
    folder.
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
    """How a policy names what a script or style element may hold."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(content: object) -> str:
    """JSON that can stand within a script element: without any "<"; what is not finite is null."""
    return json.dumps(_finite(content), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _finite(content):
    if isinstance(content, float):
        return content if abs(content) < float("inf") else None
    if isinstance(content, Mapping):
        return {name: _finite(each) for name, each in content.items()}
    return [_finite(each) for each in content] if isinstance(content, list | tuple) else content


def dot(name: str, place: int) -> str:
    """A name behind a dot of its colour."""
    return f'<span class="dot" style="--c: {colour(place)}" aria-hidden="true"></span>{escape(name)}'


def colour(place: int) -> str:
    """Of what stands at this place of the page's models or runs."""
    return f"var(--c{place % COLOURS})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table; cells are markup, the head and the caption texts."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = [f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows]
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f'<caption class="hidden">{escape(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


@dataclass(frozen=True, slots=True)
class Response:
    """What samples.js shows of a response. scores, changes: by reward; changes against the first of the row, or
    whatever else a page says; None for none."""

    text: str
    scores: Sequence[float]
    kl: float
    tokens: int
    ended: bool
    changes: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Responses to one prompt side by side. place: of the prompt; number: of the sample of it."""

    prompt: str
    place: int
    number: int
    responses: Sequence[Response]


@dataclass(frozen=True, slots=True)
class Samples:
    """names: of the columns, that of the first beside which words are marked. rewards: their names. each: samples of a
    prompt. elsewhere: where the samples stand, too, for readers without JavaScript."""

    names: Sequence[str]
    rewards: Sequence[str]
    each: int
    rows: Sequence[SampleRow]
    elsewhere: str


def sample_data(samples: Samples) -> dict:
    """As samples.js reads it."""
    rows = [
        {
            "prompt": row.prompt,
            "place": row.place,
            "number": row.number,
            "responses": [
                [
                    each.text,
                    [round(score, 6) for score in each.scores],
                    round(each.kl, 4),
                    each.tokens,
                    each.ended,
                    [change if change is None else round(change, 6) for change in each.changes],
                ]
                for each in row.responses
            ],
        }
        for row in samples.rows
    ]
    return {"names": list(samples.names), "rewards": list(samples.rewards), "each": samples.each, "rows": rows}


def sample_section(samples: Samples) -> str:
    """The list of samples with its search, filters and pages, as markup; samples.js fills it."""
    first, *others = samples.names
    models = {"any": "all", **{str(place): name for place, name in enumerate(others, 1)}}
    rewards = {str(place): name for place, name in enumerate(samples.rewards)}
    nav = (
        '<nav aria-label="{}"><button type="button" data-go="-1">previous</button>'
        '<button type="button" data-go="1">next</button><span id="{}" {}></span></nav>'
    )
    return f"""<section id="list-of-samples">
<h2>Samples</h2>
<p class="soft">Words that {escape(first)} does not have at their place are <mark>marked</mark>; with one
chosen beside it also <mark class="gone">those</mark> that it left out. Keys: / searches, j and k go from sample to
sample, n and p from page to page.</p>
<form id="controls" role="search" aria-label="samples">
<label>search prompts and responses<input id="search" type="search" autocomplete="off"></label>
{_select("model", f"beside {first}", models)}
{_select("kind", "show", KINDS)}
{_select("reward", "by reward", rewards)}
<label>change of at least<input id="least" type="number" min="0" step="any" value="0"></label>
{_select("order", "first", ORDERS)}
</form>
{nav.format("pages", "told", 'role="status" aria-live="polite"')}
<div id="list"></div>
{nav.format("pages, below", "told-below", "")}
<noscript>The samples need JavaScript; {escape(samples.elsewhere)} has them, too.</noscript>
</section>"""


def _select(name: str, label: str, options: Mapping[str, str]) -> str:
    inner = "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options.items())
    return f'<label>{escape(label)}<select id="{name}">{inner}</select></label>'
