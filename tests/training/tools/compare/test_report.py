"""Table, JSON and page of a comparison that is made by hand."""

import dataclasses
import json
import re

import pytest

from training.tools.compare.flags import CompareFlags
from training.tools.compare.measures import Sample
from training.tools.compare.report import Comparison, content, page, table, verdict
from training.tools.models import Model

HOSTILE = "</script><img src=x onerror=alert(1)>"


def comparison(scores: dict[str, list[float]], each: int = 1, **texts: str) -> Comparison:
    """Of models with these scores, whose responses are their names and places, or the text given. The second reward is
    minus the first."""
    args = CompareFlags(
        models=[f"{name}=owner/{place}" for place, name in enumerate(scores)],
        data_path=["prompts.jsonl"],
        output_dir="out",
        reward_function=["rules.py:good", "rules.py:bad"],
        num_samples_per_prompt=each,
        dtype="fp32",
    )
    samples = {
        name: [
            Sample(texts.get(name, f"{name} {place}"), {"good": score, "bad": -score}, 0.5, 3, place % 2 == 0)
            for place, score in enumerate(column)
        ]
        for name, column in scores.items()
    }
    models = [Model(name, "", f"owner/{place}", f"owner/{place}") for place, name in enumerate(scores)]
    prompts = [f"prompt <{place}>" for place in range(len(next(iter(scores.values()))) // each)]
    return Comparison(args, models, ["good", "bad"], prompts, samples)


THREE = {"first": [0.0] * 8, "worse": [-1.0, -2.0] * 4, "mixed": [1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 0.0, 0.0]}


def data_in(text: str) -> dict:
    """What the page's script reads."""
    return json.loads(re.search(r'<script type="application/json" id="samples">(.*?)</script>', text)[1])


def test_the_best_by_the_first_reward_comes_first():
    found = comparison(THREE)
    assert found.first == "first" and found.names == ["mixed", "first", "worse"]
    assert verdict(found, "worse", "good") == "worse is worse than first"
    assert verdict(found, "worse", "bad") == "worse is better than first"
    assert verdict(found, "mixed", "good") == "mixed and first do not differ by more than chance"
    lines = table(found).splitlines()
    rows = [line for line in lines if line.startswith("mixed") and "75.0 %" in line]
    assert len(rows) == 1 and "0.500 ± 0.267" in rows[0] and "*" not in rows[0]  # sd sqrt(4 / 7), over sqrt(8)
    assert [line.split()[0] for line in lines[3:6]] == ["mixed", "first", "worse"]
    assert any(line.startswith("worse") and "0.0 %" in line and line.endswith("*") for line in lines)


def test_json_has_every_number_by_model_pair_and_sample():
    found = json.loads(json.dumps(content(comparison(THREE))))
    assert [model["name"] for model in found["models"]] == ["first", "worse", "mixed"]
    assert [(pair["model"], pair["reward"]) for pair in found["pairs"]] == [
        (name, reward) for name in ("worse", "mixed") for reward in ("good", "bad")
    ]
    mixed = found["pairs"][2]
    assert (mixed["wins"], mixed["ties"], mixed["losses"]) == (5, 2, 1) and mixed["win_rate"]["value"] == 0.75
    assert mixed["difference"]["value"] == 0.5 and not mixed["win_rate"]["differs"]
    assert found["samples"][5]["responses"]["mixed"]["scores"] == {"good": -1.0, "bad": 1.0}
    assert "k1" in found["how"]["kl"]


def test_turns_stand_in_json_and_page_and_the_models_own_are_measured():
    found = comparison({"first": [0.0, 1.0], "other": [1.0, 1.0]}, first="a b")
    turns = [
        {"by": "policy", "text": "a b c"},
        {"by": "environment", "text": "x y z x y z x y z"},
        {"by": "policy", "text": "a b c", "reward": 1.0},
    ]
    talks = [dataclasses.replace(sample, turns=turns) for sample in found.samples["other"]]
    found = Comparison(found.args, found.models, found.rewards, found.prompts, found.samples | {"other": talks})
    # "a b c a b c": 4 three-grams of which 3 are distinct; a-b, b-c, c-a over 2 x 3 tokens
    assert (found.measures["other"].repetition, found.measures["other"].bigrams) == (1 / 4, 3 / 6)
    sample = content(found)["samples"][0]["responses"]
    assert sample["other"]["turns"] == turns and "turns" not in sample["first"]
    assert [len(each) for each in data_in(page(found))["rows"][0]["responses"]] == [6, 7]


def test_samples_of_a_prompt_keep_their_numbers():
    scores = {"first": [0.0, 1.0, 2.0, 3.0], "other": [4.0, 4.0, 4.0, 4.0]}
    rows = data_in(page(comparison(scores, each=2)))["rows"]
    assert [(row["place"], row["number"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row["prompt"] for row in rows] == ["prompt <0>"] * 2 + ["prompt <1>"] * 2
    assert rows[3]["responses"][1] == ["other 3", [4.0, -4.0], 0.5, 3, False, [1.0, -1.0]]


def test_the_page_fetches_nothing_and_texts_stay_texts():
    found = comparison({"a<b": [0.0, 1.0], "c&d": [1.0, 2.0]}, **{"c&d": HOSTILE})
    text = page(found)
    assert "default-src 'none'" in text
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://""", text.replace(r"\u003cimg src=x", ""))
    assert "<img" not in text and "a&lt;b" in text and "c&amp;d" in text
    data = data_in(text)
    assert data["names"] == ["a<b", "c&d"] and data["rows"][0]["responses"][1][0] == HOSTILE
    assert len(re.findall("</script>", text)) == 2


def test_pictures_say_what_they_show():
    text = page(comparison(THREE))
    found = content(comparison(THREE))["pairs"][2]["win_rate"]
    low, high = 100 * found["low"], 100 * found["high"]
    assert f'style="left: {low:.2f}%; width: {high - low:.2f}%"' in text and 'style="left: 75.00%"' in text
    assert 'aria-label="mixed wins 75.0 %' in text
    assert 'aria-label="scores of worse: mean -1.500 ± 0.189, from -2.000 to -1.000"' in text
    for control in ("search", "model", "kind", "reward", "least", "order"):
        assert re.search(rf'<label>[^<]+<(?:input|select) id="{control}"', text), f"{control} has no label"


@pytest.mark.parametrize("scores", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
def test_scores_that_are_all_the_same_have_a_page(scores):
    found = comparison({"first": scores, "same": scores}, first="x", same="x")
    assert verdict(found, "same", "good") == "same and first tie on every response"
    assert "50.0 %, 50.0 % to 50.0 %" in page(found)
