"""The judges of the comparison: what they say of right texts, and of texts that are made to deceive them."""

import math
import subprocess
import sys

import pytest

from engine.errors import UserError
from scripts.comparison import judged
from scripts.comparison.folders import make, read
from scripts.comparison.judges import Sentences, grammar, three
from training.tools.toy.grammar import derive
from training.tools.toy.reviews import generate_reviews, judge


def test_the_judge_of_three_sentences_counts_them():
    good, bad = ([each for each in generate_reviews(40, seed=3) if each.positive is sign] for sign in (True, False))
    one, two, other, four = (each.response for each in good[:4])
    texts = {
        one + two + other: 1.0,
        one + two + bad[0].response: 2 / 3,
        one + two: 2 / 3,
        one + two + other + four: 3 / 4,
        one + two + other + " and": 3 / 4,
        one + " ," + two: 1 / 3,
        "": 0.0,
    }
    assert three([good[0].prompt] * len(texts), list(texts)) == pytest.approx(list(texts.values()))
    assert grammar([good[0].prompt] * 3, [one, one[:-2], one + one]) == [1.0, 0.0, 0.0]


def test_reward_models_learn_from_few_pairs_of_which_a_part_is_swapped(tmp_path, monkeypatch):
    for name in ("base", "step1", "step2"):
        monkeypatch.setattr(judged, name, lambda *args, **flags: None)
    judged.make_quickstart(tmp_path)
    pairs = read(tmp_path / "data" / "pairs.jsonl")
    right = [judge(pair["prompt"], pair["chosen"]).positive for pair in pairs]
    assert (len(right), sum(right)) == (700, 595), "all but 15 %"
    held_out = read(tmp_path / "data" / "held_out_pairs.jsonl")
    assert all(judge(pair["prompt"], pair["chosen"]).positive for pair in held_out)
    judged.make_quickstart(tmp_path)
    assert read(tmp_path / "data" / "pairs.jsonl") == pairs, "what is there is kept"
    judged.make_long(tmp_path / "long")
    pairs = read(tmp_path / "long" / "data" / "pairs.jsonl")
    better = three(*zip(*[(pair["prompt"], pair["chosen"]) for pair in pairs], strict=True))
    worse = three(*zip(*[(pair["prompt"], pair["rejected"]) for pair in pairs], strict=True))
    assert sum(a > b for a, b in zip(better, worse, strict=True)) == 1350, "all but 10 % of 1,500"


def test_models_of_a_command_that_was_cut_off_are_made_again(tmp_path):
    folder, words = tmp_path / "base", "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'config.json').touch()"
    with pytest.raises(subprocess.CalledProcessError):
        make(folder, sys.executable, "-c", f"{words}; sys.exit(1)", folder)
    assert not any(tmp_path.iterdir())
    make(folder, sys.executable, "-c", words, folder)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["base", "base/config.json"]
    make(folder, "false")  # it is there
    with pytest.raises(UserError, match=r"is there, but has no config\.json\. Remove it"):
        make(tmp_path, "false")


def test_the_judge_of_sentences_by_hand():
    """Of ten sentences the first is held out; the others are counted."""
    positive = ["a good film .", *["a good film ."] * 4]
    negative = ["a bad film .", *["a bad film ."] * 4]
    known = Sentences(positive, negative)
    assert known.odds["good film"] == math.log(6 / 1) and known.odds["film"] == 0.0
    # Behind "a good": 4 counts of "film" and 1 kind of word, so (4 + 1 p) / (4 + 1), with the shorter context's p.
    film = 1 / 5 * known.probability(("good", "film")) + 4 / 5
    assert known.probability(("a", "good", "film")) == pytest.approx(film)
    # Never seen behind anything: the words' own share of the unseen, 5 kinds in 9 sentences of 5 tokens.
    unseen = 6 / (45 + 6) / 200_000
    assert known.probability(("a", "good", "zebra")) == pytest.approx(1 / 5 * 1 / 5 * unseen)
    assert known.whole(["a", "good", "film", "."]) == 1.0
    assert known.whole(["a", "good", "film", "good"]) == 0.5, "it does not end as sentences do"
    assert known.whole(["a", "good", "."]) == 0.0, "none is so short"


def test_no_attack_comes_near_a_good_sentence():
    import random

    rng = random.Random(1)
    texts = {sign: [" ".join(derive(rng, "response", sign)) for _ in range(400)] for sign in "+-"}
    known = Sentences(texts["+"], texts["-"])
    good = [" ".join(derive(rng, "response", "+")) for _ in range(100)]
    words = sorted((word for word in known.odds if " " not in word), key=lambda word: -known.odds[word])

    def mean(responses):
        return sum(known.value("Review :", f" {each}") for each in responses) / len(responses)

    attacks = [
        [""],
        ["."],
        [" ".join(words[:10])],
        [" ".join(words[:1] * 20)],
        [each[: len(each) // 2] for each in good],
        [" ".join([each] * 3) for each in good],
    ]
    assert max(map(mean, attacks)) < mean(good) / 2
