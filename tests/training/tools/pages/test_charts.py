"""What charts.js computes, by node where there is one: axes that end, whatever the numbers."""

import json
import shutil
import subprocess

import pytest

from training.tools.pages.page import HERE

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

pytestmark = pytest.mark.skipif(NODE is None, reason="node is not here")


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


def test_a_curve_that_is_constant_but_for_rounding_is_drawn_as_a_constant():
    rounded = labels([[0, 0.3, None], [1, 0.1 + 0.2, None], [2, 0.3, None]])
    assert rounded == labels([[0, 0.3, None], [1, 0.3, None], [2, 0.3, None]])
    assert rounded[:4] == ["0.25", "0.3", "0.35", "0"]  # a quarter to either side: 0.225 to 0.375


def test_zooming_ends_at_a_step():
    zoomed = said(
        f"(() => {{ const made = {chart([[step, step, None] for step in range(9)])};"
        "for (let i = 0; i < 200; i++) made.svg.heard.keydown({ key: '+', preventDefault() {} });"
        "return made.range; })()"
    )
    assert zoomed == [3.5, 4.5]  # of 0 to 8: 2 to 6, 3 to 5, 3.5 to 4.5
