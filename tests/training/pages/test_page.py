"""Pages need nothing beside them, and what models say never becomes markup."""

import json
import re

from training.pages.page import HERE, POLICY, document, dot, table

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 &"


def block(text: str, name: str):
    """The JSON of a page's element, as a browser finds it: up to the first end of a script."""
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)[1])


def test_texts_come_through_as_data_and_nothing_else():
    text = document(HOSTILE, HOSTILE, "<p>body</p>", {"samples": {"said": HOSTILE}}, ["samples.js"])
    assert block(text, "samples") == {"said": HOSTILE}
    assert "alert(1)</script>" not in text and text.count("<script>") == 1, "the page's own"
    assert text.count("&lt;/script&gt;&lt;script&gt;alert(1)") == 3, "title, heading and what stands below it"


def test_nothing_is_fetched():
    text = document("title", "intro", "", {}, ["charts.js", "samples.js"])
    assert f'http-equiv="Content-Security-Policy" content="{POLICY}"' in text
    assert POLICY.startswith("default-src 'none'") and "http" not in POLICY
    assert not re.search(r"\b(src|href)=|@import|fetch\(|XMLHttpRequest|url\((?!#)", text.replace("url(#${clip})", ""))


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
