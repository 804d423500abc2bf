"""Samples: harmless in a terminal, intact as TensorBoard renders them; variety of texts, by words
counted by hand, and by compression that is known to be small or large.
"""

import random
import re
from html import unescape

from training.reporting.sample_tables import samples_markdown, samples_text, visible
from training.reporting.variety import compressed_bytes, distinct_bigrams, new_words

ROW = {"prompt": "The film", "response": " was\ngood", "score": 1.25, "kl": 0.5}


def test_text_exactly():
    rows = [ROW, {"prompt": "p" * 500, "response": "r" * 500, "score": -1.0, "kl": None}]
    assert samples_text(rows).splitlines() == [
        "score 1.250, KL 0.500",
        "  prompt   The film",
        "  response  was\\ngood",
        "score -1.000, KL",
        "  prompt   ..." + "p" * 400,
        "  response " + "r" * 400 + "...",
    ]


def test_nothing_unprintable_reaches_the_terminal():
    assert visible("a\tb\r\n\x1b[31m\u202e") == "a\\tb\\r\\n\\x1b[31m\\u202e"
    assert "\x1b" not in samples_text([{"prompt": "\x1b[2J", "response": "\x07"}])


def test_markdown_survives_rendering():
    from tensorboard.plugin_util import markdown_to_safe_html

    nasty = "a|b `c` <b>d</b> <pre>x</pre> *e* [f](g) &amp; \\ ~~~\n\n# h_i_j"
    html = markdown_to_safe_html(samples_markdown([{"prompt": nasty, "response": "x", "score": 1.0, "kl": 0.25}, ROW]))
    assert html.count("<tr>") == 3
    assert html.count("<td") == 8
    for tag in ("<code>", "<b>", "<em>", "<a ", "<h1>"):
        assert tag not in html
    cells = [cell.split(">", 1)[1].split("</td>")[0] for cell in html.split("<td")[1:]]
    assert unescape(cells[2].replace("<br>", "")) == nasty.replace("\n", "\\n")
    assert cells[:2] == ["<pre>1.000</pre>", "<pre>0.250</pre>"], "numbers must not be broken"
    assert html.count("<pre>") == 6  # the numbers and their two headings
    assert "was\\n<br>good" in unescape(html)


CONVERSATION = {
    **ROW,
    "turns": [
        {"by": "policy", "text": " call\n"},
        {"by": "environment", "text": "\x1b[2J\n  policy   **policy:** <b>I won</b>|" + "e" * 1_000_000},
        {"by": "policy", "text": " so", "reward": -0.5},
    ],
}


def test_turns_in_a_terminal():
    head, *lines = samples_text([CONVERSATION, ROW]).splitlines()
    assert head == "score 1.250, KL 0.500"
    assert lines[:2] == ["  prompt      The film", "  policy       call\\n"]
    assert lines[2].startswith("  environment \\x1b[2J\\n  policy   **policy:** <b>") and len(lines[2]) == 14 + 400 + 3
    assert lines[3:5] == ["  policy       so", "  reward      -0.500"]
    assert lines[5:] == samples_text([ROW]).splitlines(), "a response alone looks as ever"


def test_an_environment_cannot_pass_for_the_policy_in_a_table():
    from tensorboard.plugin_util import markdown_to_safe_html

    html = markdown_to_safe_html(samples_markdown([CONVERSATION, ROW]))
    assert html.count("<td") == 8 and "<b>" not in html
    assert re.findall("<strong>(.*?)</strong>", html) == ["policy:", "environment:", "policy, reward -0.500:"]
    assert html.count("e" * 1_000_000) == 1
    assert samples_markdown([CONVERSATION, ROW]).splitlines()[3] == samples_markdown([ROW]).splitlines()[2]


def test_a_missing_number_leaves_its_cell_empty():
    assert samples_markdown([{"prompt": "a", "response": "b", "score": None}]).splitlines()[2] == "|  |  | a | b |"


def test_distinct_bigrams_counted_by_hand():
    # a-b, b-a, b-c; the pair across the two responses does not count, nor does a single word
    assert distinct_bigrams([" a b a b", " b c", " c"]) == 3


FIRST = ["the film", "a film end", "the odd"]
PROMPTS = ["an end", "an end", "of"]


def test_new_words_counted_by_hand():
    # "the" and "film" stand in two of the first texts, "a" and "odd" in the one of their own place, "end" in a prompt
    assert new_words(FIRST, FIRST, PROMPTS) == [0.0, 1 / 3, 1 / 2]
    # "a" and "odd" stand in other places' first texts; "zork" nowhere, twice; "The" is another word than "the"
    assert new_words(["a odd an", "zork of zork", "the The"], FIRST, PROMPTS) == [0.0, 2 / 3, 1 / 2]


def test_an_invented_word_is_new_however_often_it_is_used():
    assert new_words(["zork"] * 3, FIRST, PROMPTS) == [1.0] * 3


def test_new_words_of_no_words():
    assert new_words([], [], []) == []
    assert new_words([" "] * 3, FIRST, PROMPTS) == [0.0] * 3


def test_what_texts_share_is_compressed_once():
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh", k=200)) for _ in range(20)]
    alike, different = compressed_bytes(texts[:1] * 20), compressed_bytes(texts)
    assert different > 20 * 200 * 3 / 8, "3 bits a letter is what such texts cannot go below"
    assert alike < 250


def test_half_of_a_character_is_compressed_too():
    assert compressed_bytes(["\ud800"]) > 0  # a lone surrogate, which UTF-8 has no bytes for
