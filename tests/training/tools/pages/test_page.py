"""Pages need nothing beside them, and what models say never becomes markup; what charts.js computes and samples.js
shows, by node where there is one.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess

import pytest

from training.tools.pages.page import HERE, Response, SampleRow, Samples, document, dot, sample_data, table

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 &"


def block(text: str, name: str):
    """The JSON of a page's element, as a browser finds it: up to the first end of a script."""
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)[1])


def test_texts_come_through_as_data_and_nothing_else():
    text = document(HOSTILE, HOSTILE, "<p>body</p>", {"samples": {"said": HOSTILE}}, ["samples.js"])
    assert block(text, "samples") == {"said": HOSTILE}
    assert "alert(1)</script>" not in text and text.count("<script>") == 1, "the page's own"
    assert text.count("&lt;/script&gt;&lt;script&gt;alert(1)") == 3, "title, heading and what stands below it"


def directives(text: str) -> dict[str, list[str]]:
    """The page's policy, as a browser reads it: values by directive."""
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    return {name: values for name, *values in map(str.split, policy.split(";"))}


def test_the_policy_allows_the_pages_own_scripts_and_style_and_nothing_else():
    text = document(HOSTILE, HOSTILE, "", {"samples": HOSTILE}, ["charts.js", "samples.js"])
    files = ("charts.js", "samples.js", "style.css")
    first, second, style = (
        f"'sha256-{base64.b64encode(hashlib.sha256((HERE / name).read_bytes()).digest()).decode()}'" for name in files
    )
    assert directives(text) == {
        "default-src": ["'none'"],
        "script-src": [first, second],
        "style-src": [style],
        "style-src-attr": ["'unsafe-inline'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    for tag, hashes in (("script", [first, second]), ("style", [style])):
        found = [each.encode() for each in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)]
        assert [f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in found] == hashes
    assert directives(document("t", "i", "", {}, []))["script-src"] == ["'none'"]


def test_nothing_is_fetched():
    text = document("title", "intro", "", {}, ["charts.js", "samples.js"])
    assert not re.search(r"\b(src|href)=|@import|fetch\(|XMLHttpRequest|url\((?!#)", text.replace("url(#${clip})", ""))


def test_names_that_are_no_text_do_not_keep_a_page_from_being_written():
    text = document("run \udcff", "i", "", {"samples": "\ud800 said"}, [])
    assert "<title>run \ufffd</title>" in text.encode().decode() and block(text, "samples") == "\ud800 said"


def test_numbers_that_are_none_are_null():
    text = document("t", "i", "", {"curves": [{"points": [(1, float("nan"), None), (2, float("inf"), 0.5)]}]}, [])
    assert block(text, "curves") == [{"points": [[1, None, None], [2, None, 0.5]]}]


def test_tables_escape_heads_and_name_what_they_are():
    made = table(["", "a<b"], [[dot("x<y", 9), "1"]], "caption<")
    assert 'aria-label="caption&lt;"' in made and '<th scope="col">a&lt;b</th>' in made
    assert '<th scope="row"><span class="dot" style="--c: var(--c1)" aria-hidden="true"></span>x&lt;y</th>' in made


def test_each_colour_is_there_in_light_and_in_dark():
    style = (HERE / "style.css").read_text()
    assert [style.count(f"--c{number}: #") for number in range(8)] == [2] * 8


NODE = shutil.which("node")
DOCUMENT = """
const element = (tag) => ({ tag, children: [], set: {}, style: {},
  setAttribute(name, value) { this.set[name] = value; },
  append(...more) { this.children.push(...more); }, replaceChildren() { this.children = []; },
  addEventListener(name, heard) { this.heard = { ...this.heard, [name]: heard }; }, textContent: "" });
const places = { curves: { textContent: "[]" } };
const document = { createElementNS: (_, tag) => element(tag), createElement: element,
  getElementById: (name) => places[name] };
"""
"""As much of a browser's document as charts.js asks for."""

needs_node = pytest.mark.skipif(NODE is None, reason="node is not here")


def said(expression: str):
    """What an expression is within charts.js. A script that goes on for ever ends the test."""
    code = f"{DOCUMENT}\n{(HERE / 'charts.js').read_text()}\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def chart(points) -> str:
    """An expression: a chart with one line of these points."""
    line = {"label": "a", "color": "red", "dash": "", "points": points}
    return f"new Chart(element('div'), {json.dumps({'title': 't', 'lines': [line]})})"


def labels(points) -> list[str]:
    """What stands at the axes of a chart with these points: of values, and then of steps."""
    texts = f"{chart(points)}.svg.children.filter((each) => each.tag === 'text').map((each) => each.textContent)"
    return said(texts)[:-1]  # without the word step


@needs_node
@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (-0.55, 1.05, 5, [-0.5, 0, 0.5, 1]),
        (0.3, 0.30000000000000004, 5, None),
        (1e16, 1e16 + 2, 5, None),
        (5, 5, 5, []),
    ],
)
def test_ticks_are_round_numbers_and_come_to_an_end(low, high, count, expected):
    found = said(f"ticks({low!r}, {high!r}, {count})")
    assert len(found) <= 2 * count + 1
    assert expected is None or found == pytest.approx(expected)


@needs_node
def test_a_curve_that_is_constant_but_for_rounding_is_drawn_as_a_constant():
    rounded = labels([[0, 0.3, None], [1, 0.1 + 0.2, None], [2, 0.3, None]])
    assert rounded == labels([[0, 0.3, None], [1, 0.3, None], [2, 0.3, None]])
    assert rounded[:4] == ["0.25", "0.3", "0.35", "0"]  # a quarter to either side: 0.225 to 0.375


@needs_node
def test_zooming_ends_at_a_step():
    zoomed = said(
        f"(() => {{ const made = {chart([[step, step, None] for step in range(9)])};"
        "for (let i = 0; i < 200; i++) made.svg.heard.keydown({ key: '+', preventDefault() {} });"
        "return made.range; })()"
    )
    assert zoomed == [3.5, 4.5]  # of 0 to 8: 2 to 6, 3 to 5, 3.5 to 4.5


LIST = """
const VALUES = { model: "any", kind: "all", order: "prompt", reward: "0" };
const node = (tag) => ({ tag, children: [], style: { setProperty() {} }, dataset: {}, value: VALUES[tag] ?? "",
  set textContent(text) { this.children = [text]; }, setAttribute() {}, addEventListener() {},
  append(...more) { this.children.push(...more); }, replaceChildren(...more) { this.children = more; } });
const places = { samples: { textContent: DATA } };
const document = { createElement: node, createDocumentFragment: () => node("fragment"), addEventListener() {},
  querySelectorAll: () => [], getElementById: (name) => (places[name] ??= node(name)) };
const written = (each) => typeof each === "string" ? each
  : `<${[each.tag, each.className].filter(Boolean).join(".")}>${each.children.map(written).join("")}</>`;
"""
"""As much of a browser's document as samples.js asks for, and what an element then holds, on one line."""


@needs_node
def test_a_conversation_is_shown_turn_by_turn_and_an_environments_words_are_never_marked():
    turns = [
        {"by": "policy", "text": "call one"},
        {"by": "environment", "text": HOSTILE},
        {"by": "policy", "text": "so zork", "reward": -0.5},
        {"by": "environment", "text": ""},
    ]
    responses = [Response("call so", [1.0], 0.0, 2, True, [0.0]), Response("x", [2.0], 0.0, 4, True, [1.0], turns)]
    rows = [SampleRow("ask", 0, 0, responses)]
    data = json.dumps(sample_data(Samples(["before", "after"], ["score"], 1, rows, "")))
    code = (
        f"const DATA = {json.dumps(data)};{LIST}{(HERE / 'samples.js').read_text()}\nconsole.log(written(at('list')));"
    )
    page = subprocess.run([NODE, "-e", code], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    first, second = page.split("<section>")[1:]
    assert "<p>call so</>" in first and "<ol" not in first
    assert second[second.index("<ol") :].startswith(
        "<ol.turns><li.policy><small>policy</><p>call <mark>one</></></>"
        f"<li.environment><small>environment</><p>{HOSTILE}</></>"
        "<li.policy><small>policy, reward \u22120.500</><p>so <mark>zork</></></>"
        "<li.environment><small>environment</><p>(no text)</></></>"
    )
