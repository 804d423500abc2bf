"""Pages need nothing beside them, and what models say never becomes markup."""

import base64
import hashlib
import json
import re

from training.tools.pages.page import HERE, document, dot, table

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
